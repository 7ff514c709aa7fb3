"""The command line: ``esmeray``, or ``python -m esmeray.tools``, lists its commands.

``esmeray COMMAND --help`` explains one. Each command is a subpackage, whose modules are the subcommands, each with
``main(argv) -> int``. Commands in :data:`ALONE` need no subcommand. Only the module that runs is imported, because some
take seconds to import.
"""

import ast
import importlib
import pkgutil
from pathlib import Path

from esmeray import __version__
from esmeray.common.command_line import end_process, program_of
from esmeray.common.errors import ConfigError, did_you_mean

COMMANDS = {
    "data": ("convert", "Convert FASTA and structure files to stores, and inspect stores."),
    "train": ("run", "Train a model, or resume it; show the state of a run, compare runs, export."),
    "tune": ("run", "Search for the fastest settings of an experiment with Ray Tune, and for its batch size."),
    "embed": ("run", "Compute embeddings; search, evaluate, plot them."),
    "classify": ("predict", "Predict labels with a trained classifier, and evaluate it."),
    "mutations": ("score", "Score mutants, scan them all, fit measured ones, propose the next."),
    "design": ("generate", "Generate and score sequences for a structure; predict structures."),
    "function": ("predict", "Predict functions (GO terms) of proteins, and evaluate predictions as CAFA does."),
    "align": ("run", "Exact Smith-Waterman search against a sequence store, with hits in BLAST's format."),
    "serve": ("run", "Serve embeddings, classes and mutation scores over HTTP; send a file, make API keys."),
    "profile": ("model", "Profile models; compare devices; check and record GPUs, analyse GPU logs."),
}
"""Commands in the order in which a new user needs them.

Each has the module whose first example represents the command, and a summary.
"""
ALONE = ("train", "tune", "align")
"""Commands that run their module ``run`` if no subcommand is named."""


def main(argv: list[str]) -> int:
    """Run the command that the first arguments name."""
    if not argv or argv[0] in ("-h", "--help", "--version"):
        print(f"esmeray {__version__}" if argv == ["--version"] else _overview())
        return 0
    command, *arguments = argv
    if command not in COMMANDS:
        # `esmeray export` is a subcommand without its command: suggest the commands that have it.
        complete = [f"{name} {command}" for name in COMMANDS if command in subcommands(name)]
        hint = f" (did you mean {' or '.join(complete)}?)" if complete else did_you_mean(command, COMMANDS)
        raise ConfigError(f"unknown command {command!r}{hint}; available: {', '.join(COMMANDS)}")
    names = subcommands(command)
    if names and arguments[:1] in (["-h"], ["--help"]):
        print(_command_overview(command, names))
        if command not in ALONE:
            return 0
        # The help of `run` follows, because it runs without a subcommand.
    module, arguments = _module(command, names, arguments)
    # Import this module only: all modules together load torch, Ray and Matplotlib.
    return importlib.import_module(f"esmeray.tools.{command}.{module}").main(arguments)


def subcommands(command: str) -> list[str]:
    """Names of a command's subcommands, sorted."""
    modules = pkgutil.iter_modules([str(Path(__file__).with_name(command))])
    # Modules with a leading _ are shared by subcommands.
    names = sorted(module.name for module in modules if not module.name.startswith("_"))
    if command in ALONE:
        names.remove("run")
    return names


def _module(command: str, names: list[str], arguments: list[str]) -> tuple[str, list[str]]:
    """Return the module to run, and its arguments."""
    first = arguments[0] if arguments else ""
    if first in names:
        return first, arguments[1:]
    # An unknown word is a mistyped subcommand: ``run`` takes no target.
    is_option = first.startswith("-") or not first
    if command in ALONE and (is_option or not names):
        return "run", arguments  # run reports what is missing
    problem = "a subcommand is missing" if is_option else f"unknown subcommand {first!r}{did_you_mean(first, names)}"
    raise ConfigError(
        f"{program_of(command)}: {problem}; available: {', '.join(names)}; for example: {example(command)}"
    )


def example(command: str, module: str | None = None) -> str:
    """First example of a subcommand, by default of the one that represents the command."""
    lines = _docstring(command, module or COMMANDS[command][0]).splitlines()
    return next(line.strip() for line in lines if line.startswith("  esmeray "))


def _overview() -> str:
    # Two lines per command, so that all fit on a screen.
    lines = [f"usage: {program_of('COMMAND')} [SUBCOMMAND] [--section.key VALUE ...]"]
    for command, (_, subject) in COMMANDS.items():
        names = subcommands(command)
        others = f" ({', '.join(names)})" if names else ""
        lines += [f"{command:<9} {subject}{others}", f"          {example(command)}"]
    end = f"{program_of('COMMAND')} --help has an example of each subcommand; README.md has one of each purpose."
    return "\n".join([*lines, end])  # 24 lines, the height of a terminal


def _command_overview(command: str, names: list[str]) -> str:
    width = max(map(len, names))
    usage = f"usage: {program_of(command)} {'[SUBCOMMAND]' if command in ALONE else 'SUBCOMMAND'} ..."
    lines = []
    for name in names:
        lines += [
            f"  {name:<{width}}  {_docstring(command, name).splitlines()[0]}",
            f"  {'':<{width}}  {example(command, name)}",
        ]
    end = (
        f"{program_of(command)} SUBCOMMAND --help explains a "
        f"subcommand.{' Without a subcommand:' if command in ALONE else ''}"
    )
    return "\n".join([usage, "", *lines, "", end, ""])


def _docstring(command: str, module: str) -> str:
    """Docstring of a module, read without importing it, because some take seconds to import."""
    source = (Path(__file__).with_name(command) / f"{module}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def entry_point() -> None:
    """Run the process's command line and end with its exit code."""
    end_process(main)


if __name__ == "__main__":
    entry_point()
