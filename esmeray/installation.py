"""Where Esmeray's code lies, and how other processes find it.

In a checkout the rooms lie beside the folder ``esmeray``, in a wheel within it.
"""

import os
from pathlib import Path

import esmeray

PACKAGE = Path(esmeray.__file__).parent
CHECKOUT = PACKAGE.parent if len(esmeray.__path__) > 1 else None
ROOMS = CHECKOUT or PACKAGE
"""The folder of the rooms."""


def python_path() -> str:
    """PYTHONPATH of processes in other folders: this process's, and the checkout, which need not be installed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(filter(None, [str(CHECKOUT or ""), *given])))
