"""Where Esmeray's code lies, how other processes find it, and what other installed packages add to it.

In a checkout the rooms lie beside the folder ``esmeray``, in a wheel within it.
"""

import os
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import esmeray
from esmeray.common.errors import ConfigError
from esmeray.common.text import first_line

PACKAGE = Path(esmeray.__file__).parent
CHECKOUT = PACKAGE.parent if len(esmeray.__path__) > 1 else None
ROOMS = CHECKOUT or PACKAGE
"""The folder of the rooms."""


def python_path() -> str:
    """PYTHONPATH of processes in other folders: this process's, and the checkout, which need not be installed."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # This process's own first: what somebody has put before the checkout stays before it.
    return os.pathsep.join(dict.fromkeys(filter(None, [str(CHECKOUT or ""), *paths])))


_entry_points = cache(entry_points)
"""Of all installed packages: reading them takes 30 ms."""


# Cached, also so that a class of another package stays the same object.
@cache
def added(kind: str, shipped: tuple[str, ...]) -> dict[str, Any]:
    """Additions of other packages to what is ``shipped``, by name: entry points of the group ``esmeray.KIND``.

    Raises ConfigError where one can't be imported, or has a name that is taken: it would be used in another's place.
    """
    additions: dict[str, Any] = {}
    for point in _entry_points().select(group=f"esmeray.{kind}"):
        package = point.dist.name if point.dist else point.module
        adds = f"the installed package {package} adds {point.name} to esmeray.{kind}"
        if point.name in shipped or point.name in additions:
            raise ConfigError(f"{adds}, where this name is taken; rename it, or uninstall the package")
        try:
            additions[point.name] = point.load()
        except Exception as error:  # whatever breaks in a package of somebody else's
            raise ConfigError(
                f"{adds}, and can't be imported ({first_line(error)}); mend it, or uninstall it"
            ) from error
    return additions
