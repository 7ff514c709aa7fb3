"""The command line: ``esmeray``, or ``python -m esmeray.tools``, lists its commands; ``esmeray COMMAND --help``
explains one.

A command is a package of this one. Its modules are its subcommands, each with ``main(argv) -> int``; commands of
:data:`ALONE` need no subcommand. Only the module that is needed is imported, since some take seconds.
"""

import ast
import importlib
import pkgutil
from pathlib import Path

from esmeray import __version__
from esmeray.common.command_line import end_process, program_of
from esmeray.common.errors import ConfigError
from esmeray.common.text import did_you_mean

COMMANDS = {
    "data": ("convert", "Convert FASTA and structure files to stores, and inspect stores."),
    "train": ("run", "Train a model, or resume it; show the state of a run, compare runs, export."),
    "tune": ("run", "Search for the fastest settings of an experiment by Ray Tune, and for its batch size."),
    "embed": ("run", "Compute embeddings; search, evaluate, plot them."),
    "classify": ("predict", "Predict labels by a trained classifier, and evaluate it."),
    "mutations": ("score", "Score mutants, scan them all, fit measured ones, propose the next."),
    "design": ("generate", "Generate and score sequences for a structure; predict structures."),
    "function": ("predict", "Predict functions (GO terms) of proteins, and evaluate predictions as CAFA does."),
    "align": ("run", "Align proteins with all of a store, exactly, and write the best hits as BLAST does."),
    "serve": ("run", "Serve embeddings, classes and mutation scores over HTTP; send a file, make API keys."),
    "profile": ("model", "Find out what is slow; compare devices; check and record GPUs, analyse a log."),
}
"""In the order in which a newcomer meets them: the module whose first example shows the command, and its subject."""
ALONE = ("train", "tune", "align")
"""Commands whose module ``run`` has no name on the command line."""


def main(argv: list[str]) -> int:
    """Run the command that the first arguments name."""
    if not argv or argv[0] in ("-h", "--help", "--version"):
        print(f"esmeray {__version__}" if argv == ["--version"] else _overview())
        return 0
    command, *arguments = argv
    if command not in COMMANDS:
        # Who types `esmeray export` knows the subcommand and forgot whose it is.
        complete = [f"{name} {command}" for name in COMMANDS if command in subcommands(name)]
        hint = f" (did you mean {' or '.join(complete)}?)" if complete else did_you_mean(command, COMMANDS)
        raise ConfigError(f"there is no command {command!r}{hint}; there are {', '.join(COMMANDS)}")
    names = subcommands(command)
    if names and arguments[:1] in (["-h"], ["--help"]):
        print(_command_overview(command, names))
        if command not in ALONE:
            return 0
        # That of `run` follows: without a subcommand it is what the help was asked of.
    module, arguments = _module(command, names, arguments)
    # One module alone: together they load torch, Ray and Matplotlib.
    return importlib.import_module(f"esmeray.tools.{command}.{module}").main(arguments)


def subcommands(command: str) -> list[str]:
    """Names of a command's subcommands, in order."""
    modules = pkgutil.iter_modules([str(Path(__file__).with_name(command))])
    # A leading _ marks what subcommands share.
    names = sorted(module.name for module in modules if not module.name.startswith("_"))
    if command in ALONE:
        names.remove("run")
    return names


def _module(command: str, names: list[str], arguments: list[str]) -> tuple[str, list[str]]:
    """The module that is named, or that runs without a name, and its arguments."""
    first = arguments[0] if arguments else ""
    if first in names:
        return first, arguments[1:]
    # A word that is neither is more likely a mistyped subcommand than a target: run takes none.
    is_option = first.startswith("-") or not first
    if command in ALONE and (is_option or not names):
        return "run", arguments  # which says what it needs
    problem = "name a subcommand" if is_option else f"there is no subcommand {first!r}{did_you_mean(first, names)}"
    raise ConfigError(
        f"{program_of(command)}: {problem}; there are {', '.join(names)}; for example: {example(command)}"
    )


def example(command: str, module: str | None = None) -> str:
    """The first example of a subcommand; of the one that shows the command best where none is named."""
    lines = _docstring(command, module or COMMANDS[command][0]).splitlines()
    return next(line.strip() for line in lines if line.startswith("  esmeray "))


def _overview() -> str:
    # Two lines a command, so that all fit on a screen.
    lines = [f"usage: {program_of('COMMAND')} [SUBCOMMAND] [--section.key VALUE ...]"]
    for command, (_, subject) in COMMANDS.items():
        names = subcommands(command)
        others = f" ({', '.join(names)})" if names else ""
        lines += [f"{command:<9} {subject}{others}", f"          {example(command)}"]
    end = f"{program_of('COMMAND')} --help has an example of each subcommand; README.md has one of each purpose."
    return "\n".join([*lines, end])  # 24 lines, a terminal's


def _command_overview(command: str, names: list[str]) -> str:
    width = max(map(len, names))
    usage = f"usage: {program_of(command)} {'[SUBCOMMAND]' if command in ALONE else 'SUBCOMMAND'} ..."
    lines = []
    for name in names:
        lines += [
            f"  {name:<{width}}  {_docstring(command, name).splitlines()[0]}",
            f"  {'':<{width}}  {example(command, name)}",
        ]
    end = f"{program_of(command)} SUBCOMMAND --help explains one.{' Without one:' if command in ALONE else ''}"
    return "\n".join([usage, "", *lines, "", end, ""])


def _docstring(command: str, module: str) -> str:
    """Docstring of a module, which is not imported for it, since some take seconds."""
    source = (Path(__file__).with_name(command) / f"{module}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def entry_point() -> None:
    """Run the process's command line and end with its exit code."""
    end_process(main)


if __name__ == "__main__":
    entry_point()
