"""The grammar of all commands: ``esmeray COMMAND [SUBCOMMAND] [TARGET] --config FILE --section.key VALUE --flag``.

In: the schema of a command's settings, which a file may hold as well, and its :class:`Plain` with what stands on the
command line alone: flags and at most one thing that it acts upon. Out: both, checked. A mistake is one line that names
the option, or file and line; where something is missing the line ends with the first example of the module's docstring.
"""

import argparse
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic.fields import FieldInfo

from esmeray.common.command_line import program_of
from esmeray.common.errors import ConfigError
from esmeray.common.text import did_you_mean
from esmeray.train_config.command_schema import COMMANDS
from esmeray.train_config.loading import MissingError, load_settings, read_file
from esmeray.train_config.section import (
    KeyPath,
    Overrides,
    Section,
    list_type,
    may_be_none,
    metavar,
    own_settings,
    sections_of,
    settings_of,
)
from esmeray.training.config import Config

_HELP_COLUMN = 38


class Plain(Section):
    """Base of what stands on the command line alone.

    A bool is a flag, what has no default is the target, of which a list has several, and anything else an option with a
    value. A name may end in _.
    """


class Overwriting(Plain):
    """Flag of commands that write."""

    overwrite: bool = False
    """Replace what this command made and nobody changed since."""


class OnModel(Overwriting):
    """Target of commands that take a trained model."""

    model: Path
    """Folder of a run, or of an export of one."""


class OnRun(Overwriting):
    """Target of commands that take a run."""

    run: Path
    """Folder of the run."""


PlainKind = TypeVar("PlainKind", bound=Plain)
Settings = TypeVar("Settings", bound=Section)


def parse(
    argv: list[str], command: str, text: str | None, plain: type[PlainKind], settings: type[Settings]
) -> tuple[PlainKind, Settings]:
    """A command's target and flags, and its settings, checked; ``text`` is its module's docstring.

    ``settings`` is the command's schema, or the section that is all of it. Prints the help and ends the process where
    that is asked for. Raises ConfigError with one line a problem.
    """
    return parse_with_run(argv, command, text, plain, settings, Section)[:2]


def parse_with_run(
    argv: list[str],
    command: str,
    text: str | None,
    plain: type[PlainKind],
    settings: type[Settings],
    also: type[Section] = Config,
) -> tuple[PlainKind, Settings, Overrides]:
    """As :func:`parse`, with the settings of an experiment, unchecked: they override what a run recorded."""
    schema = COMMANDS.get(command, Section)
    target, file, overrides = read_words(argv, command, text, plain, schema, also)
    own = {key: value for key, value in overrides.items() if key[0] in schema.model_fields}
    of_run = {key: value for key, value in overrides.items() if key not in own}
    try:
        loaded: Any = load_settings(schema, file, own)
    except MissingError as error:
        raise ConfigError(f"{error}; {example_of(text, command)}") from None
    if schema is not settings:
        ((_, loaded),) = loaded
    return target, loaded, of_run


def read_words(
    argv: list[str],
    command: str,
    text: str | None,
    plain: type[PlainKind],
    schema: type[Section],
    also: type[Section] = Section,
) -> tuple[PlainKind, str | None, Overrides]:
    """Target and flags, the file of settings, and settings that override it, or what a run recorded, unchecked.

    Settings of ``also`` are understood, and left out of the help.
    """
    sections = sections_of(schema)
    if {"-h", "--help"} & set(argv):
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        early.add_argument("--config")
        _Parser(command, plain, sections, text, early.parse_known_args(argv)[0].config).print_help()
        raise SystemExit(0)
    parser = _Parser(command, plain, {**sections_of(also), **sections}, text, None)
    parser.refuse_unknown(argv)
    parsed, unexpected = parser.parse_known_intermixed_args(argv)
    if unexpected:
        raise ConfigError(f"unexpected argument {' '.join(unexpected)}; {example_of(text, command)}")
    values = vars(parsed)
    own: Overrides = {(name,): values[name] for name in plain.model_fields if name in values}
    overrides = {}
    for key, field in {**settings_of(also), **settings_of(schema)}.items():
        name = ".".join(key)
        if name in values:
            overrides[key] = _value(field.annotation, values[name], f"--{name}")
    try:
        return load_settings(plain, None, own), values.get("config"), overrides
    except MissingError as error:
        missing = str(error).replace("--", "").upper().replace("MISSING", "missing")
        raise ConfigError(f"{missing}; {example_of(text, command)}") from None


def example_of(text: str | None, command: str) -> str:
    """The first example of a command's docstring."""
    examples = [line.strip() for line in (text or "").splitlines() if line.startswith("  esmeray ")]
    return f"for example: {examples[0] if examples else f'{program_of(command)} --help'}"


class _Parser(argparse.ArgumentParser):
    """argparse with a group for each section, and mistakes as ConfigError."""

    def __init__(
        self,
        command: str,
        plain: type[Plain],
        sections: dict[KeyPath, type[Section]],
        text: str | None,
        file: str | None,
    ) -> None:
        groups = {path: section for path, section in sections.items() if own_settings(section)}
        required = {name: field for name, field in plain.model_fields.items() if field.is_required()}
        targets = [name.upper() + " ..." * bool(list_type(field.annotation)) for name, field in required.items()]
        settings = ["[--config FILE] [--section.key VALUE ...]"] if groups else []
        options = [f"[{_option(name)}]" for name, field in plain.model_fields.items() if not field.is_required()]
        super().__init__(
            usage=_escaped(" ".join([program_of(command), *targets, *settings, *options])),
            description=text,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=_HELP_COLUMN),
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        for name, field in plain.model_fields.items():
            if field.is_required():
                number = "*" if list_type(field.annotation) else "?"
                self.add_argument(name, nargs=number, metavar=name.upper(), help=_help(field))
            elif field.annotation is bool:
                self.add_argument(_option(name), dest=name, action="store_true", help=_help(field))
            else:
                self.add_argument(_option(name), dest=name, metavar="FILE", help=_help(field))
        if groups:
            self.add_argument("--config", metavar="FILE", help="YAML file of the settings below, which override it.")
        values = read_file(file)[0] if file else {}
        for path, section in groups.items():
            group = self.add_argument_group(".".join(path), " ".join((section.__doc__ or "").split()))
            for key, field in own_settings(section, path).items():
                group.add_argument(
                    f"--{'.'.join(key)}",
                    nargs="*" if list_type(field.annotation) else None,
                    metavar=metavar(field.annotation),
                    help=f"{_help(field)} {_default(key, field, values)}",
                )

    def refuse_unknown(self, argv: list[str]) -> None:
        """Raise ConfigError for options that there are not, each with the one that may be meant."""
        known = self._option_string_actions
        names = [word.partition("=")[0] for word in argv if word.startswith("--")]
        unknown = [f"unknown option {name}{did_you_mean(name, known)}" for name in names if name not in known]
        if unknown:
            raise ConfigError(", ".join(unknown))

    def error(self, message: str) -> NoReturn:
        """Refuse in one line, as every command does."""
        raise ConfigError(message.removeprefix("argument "))


def _option(name: str) -> str:
    return f"--{name.rstrip('_')}"


def _help(field: FieldInfo) -> str:
    return _escaped(" ".join((field.description or "").split()))


def _default(key: KeyPath, field: FieldInfo, values: Any) -> str:
    """The value of the file, or else the schema's, in words."""
    for name in key:
        values = values.get(name, ...) if isinstance(values, dict) else ...
    if values is ...:
        if field.is_required():
            return "(required)"
        values = field.get_default(call_default_factory=True)
    items = values if isinstance(values, (list, tuple)) else [values]
    return _escaped(f"(default: {' '.join(_word(item) for item in items)})")


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    """Text for argparse, which fills in what follows a percent sign in the usage and in the help of an option."""
    return text.replace("%", "%%")


def _value(annotation: Any, words: str | list[str], option: str) -> Any:
    """The text of a setting on the command line; None or an empty list where it says ``none``."""
    items = words if isinstance(words, list) else [words]
    if not items:
        raise ConfigError(f"{option}: a value is missing")
    is_list = list_type(annotation) is not None
    optional = may_be_none(annotation)
    if (optional or is_list) and [item.lower() for item in items] in (["none"], ["null"]):
        return None if optional else []
    return words
