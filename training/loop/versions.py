"""Versions that a result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "lmdb", "numpy")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that training rests on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
