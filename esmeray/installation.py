"""Location of Esmeray's code, the PYTHONPATH of other processes, and additions by other installed packages."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import esmeray
from esmeray.common.command_line import warn
from esmeray.common.errors import UNUSABLE, ConfigError, first_line

PACKAGE = Path(esmeray.__file__).parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "train_ray.py").is_file() else None
"""The repository, or None for an installed wheel."""


def python_path() -> str:
    """Return PYTHONPATH for processes in other folders. It includes the checkout, which need not be installed."""
    # The checkout first, then this process's own entries.
    return os.pathsep.join(
        dict.fromkeys(filter(None, [str(CHECKOUT or ""), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    )


_entry_points = cache(entry_points)
"""Entry points of all installed packages; cached, since reading them takes 30 ms."""
_WARNS = "ESMERAY_WARNING_PROCESS"
"""Environment variable with the id of the process that warns of broken packages."""


# Cached, so that a class of another package is always the same object.
@cache
def added(
    kind: str, shipped: tuple[str, ...], of_type: type, checked: Callable[[str, Any], Any] | None = None
) -> dict[str, Any]:
    """Return additions of other packages to ``shipped``, by name: entry points of the group ``esmeray.KIND``.

    Each addition has the type ``of_type``. ``checked`` takes its name and the object, and returns the object to use, or
    raises. Additions that can't be imported or used are left out with a warning; a request for one by name reports the
    reason (:data:`esmeray.common.errors.UNUSABLE`).
    """
    points = _entry_points().select(group=f"esmeray.{kind}")
    names = [point.name for point in points]
    additions = {}
    for point in points:
        what = f"{point.name!r} of esmeray.{kind}, by the package {point.dist.name if point.dist else point.value},"
        objections = {
            # Names become options and file names.
            "a name has letters, digits, - and _ only": not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", point.name),
            "this name is taken": point.name in shipped,
            # None of them is used: the order of packages differs between machines.
            "this name is added more than once": names.count(point.name) > 1,
        }
        holding = [text for text, holds in objections.items() if holds]
        try:
            additions[point.name] = imported(partial(_load, point, of_type, checked, holding), what)
        except ConfigError as error:
            if point.name not in shipped:
                UNUSABLE[point.name] = "; ".join(filter(None, (UNUSABLE.get(point.name), str(error))))
            # Child processes import the same packages, and would warn again.
            if os.environ.setdefault(_WARNS, str(os.getpid())) == str(os.getpid()):
                warn(str(error))
    return additions


def _load(point: EntryPoint, of_type: type, checked: Callable[[str, Any], Any] | None, objections: list[str]) -> Any:
    if objections:
        raise ConfigError(objections[0])
    loaded = point.load()
    expect(loaded, of_type, "it")
    return checked(point.name, loaded) if checked else loaded


def imported(load: Callable[[], Any], what: str) -> Any:
    """Return the object that ``load`` imports from another package. Raises ConfigError for any error of the import."""
    from esmeray.common.progress import status_line  # imported here: most processes import nothing of other packages

    try:
        # Redirected: output of an import is not part of the result.
        with redirect_stdout(sys.stderr), status_line(f"importing {what}"):
            return load()
    except BaseException as error:  # an import may call sys.exit
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C and the signals of clusters end the command
            raise
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what} can't be used ({kind}{first_line(error)}); fix or uninstall it") from error


def expect(value: Any, kind: Any, name: str) -> None:
    """Raise ConfigError unless a value of another package is of this type."""
    if not isinstance(value, kind):
        expected = "class" if kind is type else getattr(kind, "__name__", kind)
        raise ConfigError(f"{name} is {value!r:.100}, not a {expected}")
