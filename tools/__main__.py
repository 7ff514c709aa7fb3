"""The command line: ``esmeray``, or ``python -m tools``, lists its commands; ``esmeray NAME --help`` explains one.

A command is a module of this package with ``main(argv) -> int``; the first line of its docstring is its line in the
list. Only the module that is named is imported, since some take seconds.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import signal
import sys
from pathlib import Path

import tools
from common.arguments import program_of
from common.command_line import TERMINATED, run
from common.errors import ConfigError
from common.text import did_you_mean


def main(argv: list[str]) -> int:
    """Run the command that the first argument names."""
    names = tool_names()
    if not argv or argv[0] in {"-h", "--help"}:
        print(_overview(names))
        return 0
    name, *arguments = argv
    if name not in names:
        raise ConfigError(f"there is no command {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
    return importlib.import_module(f"tools.{name}").main(arguments)


def tool_names() -> list[str]:
    """Names of the commands, in order."""
    return sorted(module.name for module in pkgutil.iter_modules(tools.__path__) if not module.name.startswith("_"))


def _overview(names: list[str]) -> str:
    width = max(map(len, names))
    lines = [f"  {name:<{width}}  {_first_line(name)}" for name in names]
    return "\n".join([f"usage: {program_of('NAME')} ...", "", *lines, "", f"{program_of('NAME')} --help says more."])


def _first_line(name: str) -> str:
    source = Path(tools.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n", 1)[0]


def _terminate(*_: object) -> None:
    """Leave by an exception, so that what is half done is removed on the way out."""
    raise SystemExit(TERMINATED)


def entry_point() -> None:
    """Run the process's command line and end with its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(main))


if __name__ == "__main__":
    entry_point()
