"""The packages, which pyproject.toml can't name: each folder of code here is a package below ``esmeray``."""

from setuptools import find_packages, setup

FOLDERS = find_packages(exclude=["esmeray", "tests*"])
ROOMS = {f"esmeray.{folder}": folder for folder in FOLDERS if "." not in folder}

setup(packages=["esmeray", *(f"esmeray.{folder}" for folder in FOLDERS)], package_dir={"esmeray": "esmeray"} | ROOMS)
