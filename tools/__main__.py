"""The command-line tools: ``python -m tools`` lists them, ``python -m tools NAME --help`` teaches one.

A tool is a module of this package with ``main(argv) -> int``; the first line of its docstring is its line in the list.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import signal
import sys
from pathlib import Path

import tools
from common.command_line import run
from common.errors import ConfigError

TERMINATED = 143
"""Exit code after SIGTERM (128 + 15), as shells report it."""


def main(argv: list[str]) -> int:
    """Run the tool that the first argument names."""
    names = tool_names()
    if not argv or argv[0] in {"-h", "--help"}:
        print(_overview(names))
        return 0
    name, *arguments = argv
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise ConfigError(f"no tool is called {name!r}; {hint}")
    return importlib.import_module(f"tools.{name}").main(arguments)


def tool_names() -> list[str]:
    """Names of the tools, in order."""
    return sorted(module.name for module in pkgutil.iter_modules(tools.__path__) if not module.name.startswith("_"))


def _overview(names: list[str]) -> str:
    width = max(map(len, names))
    lines = [f"  {name:<{width}}  {_first_line(name)}" for name in names]
    return "\n".join(["usage: python -m tools NAME ...", "", *lines, "", "python -m tools NAME --help says more."])


def _first_line(name: str) -> str:
    # Parsed, not imported: a tool may load libraries that take seconds.
    source = Path(tools.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n", 1)[0]


def _terminate(*_: object) -> None:
    """Leave by an exception, so that what is half done is removed on the way out."""
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(main))
