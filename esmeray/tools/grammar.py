"""The grammar of all commands: ``esmeray COMMAND [SUBCOMMAND] [TARGET] --config FILE --section.key VALUE --flag``.

A command is a function whose parameters are its settings, targets and flags. :func:`command` parses and validates the
arguments and calls the function. An error is one line that names the option, or the file and line. If something is
missing, the line ends with the first example of the module's docstring.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from esmeray.common.command_line import program_of
from esmeray.common.errors import ConfigError, did_you_mean
from esmeray.common.publishing import made_file, made_folder, refuse_existing, refuse_file
from esmeray.dataset.section import IngestSection
from esmeray.train_config.loading import MissingError, load_settings, read_file
from esmeray.train_config.removed import removal_of
from esmeray.train_config.section import (
    KeyPath,
    Overrides,
    Section,
    list_type,
    metavar,
    own_settings,
    sections_of,
    settings_of,
)


class Command(Section):
    """Base of a command's arguments: sections, whose settings may also come from a file, and words.

    Words are given on the command line only:

    - a bool is a flag;
    - a word without a default, or with :data:`OPTIONAL_TARGET`, is the target; a list takes several targets;
    - any other word is an option with a value.

    A name may end in _, which the option does not have.
    """


@dataclass(frozen=True)
class OutputWriter:
    """Writer of a command's outputs, which replaces earlier outputs of the same command if ``overwrite`` is set.

    ``made_by`` is the name of the command in the manifests of its outputs.
    """

    # Separate from the command's name: that may change, but existing outputs are recognized by this one.
    made_by: str
    overwrite: bool

    def refuse_existing(self, target: Path | None) -> None:
        """Call :func:`esmeray.common.publishing.refuse_existing` if there is a target."""
        if target is not None:
            refuse_existing(target, self.made_by, self.overwrite)

    def refuse_file(self, target: Path | None) -> None:
        """Call :func:`esmeray.common.publishing.refuse_file` if there is a target."""
        if target is not None:
            refuse_file(target, self.made_by, self.overwrite)

    def folder(self, target: Path) -> AbstractContextManager[Path]:
        return made_folder(target.absolute(), self.made_by, self.overwrite)

    def file(self, target: Path) -> AbstractContextManager[Path]:
        return made_file(target, self.made_by, self.overwrite)

    def write_json(self, target: Path | None, content: dict[str, Any], indent: int = 1) -> None:
        """Write a JSON file if there is a target."""
        if target is not None:
            with self.file(target) as building:
                building.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


OPTIONAL_TARGET = "optional target"
"""Metadata that makes a word with a default a target instead of an option."""
Overwrite = Annotated[
    bool, Field(description="Replace an existing output of this command if it has not been modified.")
]
ModelPath = Annotated[Path, Field(description="Folder of a run or of its export.")]
RunPath = Annotated[Path, Field(description="Folder of the run.")]


class IngestedSection(Section):
    """Policies for unusual records in input files."""

    ingest: IngestSection = IngestSection()


class ClusterSection(Section):
    """Ray cluster to run on."""

    address: str | None = None
    """Ray cluster as HOST:PORT; local starts one. Default: RAY_ADDRESS, or a cluster that runs on this machine."""


Arguments = TypeVar("Arguments", bound=Command)


@dataclass(frozen=True)
class Main:
    """``main(argv)`` of a command, made from the function that does its work and returns its exit code (None: 0).

    The function's parameters are the sections and words of the command. Two types have a meaning of their own:

    - :class:`OutputWriter` writes the outputs; it adds the flag ``--overwrite``.
    - ``Overrides`` are settings of an experiment, not validated yet, which override the settings of a run.
    """

    name: str
    text: str | None
    made_by: str
    work: Callable[..., int | None]

    @property
    def schema(self) -> type[Command]:
        """The sections and words."""
        fields: dict[str, Any] = {}
        for name, parameter in signature(self.work).parameters.items():
            if parameter.annotation is OutputWriter:
                fields["overwrite"] = Overwrite, False
            elif parameter.annotation is not Overrides:
                fields[name] = parameter.annotation, ... if parameter.default is parameter.empty else parameter.default
        # Descriptions are in the annotations. By default pydantic also searches the source of each caller for them,
        # which takes 0.1 s.
        return create_model("Arguments", __base__=Command, __cls_kwargs__={"use_attribute_docstrings": False}, **fields)

    def __call__(self, argv: list[str]) -> int:
        kinds = {name: parameter.annotation for name, parameter in signature(self.work).parameters.items()}
        run: type[Section] = Section
        if Overrides in kinds.values():
            from esmeray.training.config import Config  # imported here: it loads the sections of all tasks

            run = Config
        arguments, overrides = parse(argv, self.name, self.text, self.schema, run)
        values = dict(arguments)
        for name, kind in kinds.items():
            if kind is OutputWriter:
                values[name] = OutputWriter(self.made_by, values.pop("overwrite"))
            elif kind is Overrides:
                values[name] = overrides
        from esmeray.common.progress import working  # imported here: not needed if the arguments are wrong

        with working(f"{self.name}: working"):
            return self.work(**values) or 0


def command(name: str, text: str | None, made_by: str = "") -> Callable[[Callable[..., int | None]], Main]:
    """Make ``main(argv)`` from a function. ``text`` is the docstring of the command's module."""
    return partial(Main, name, text, made_by)


def parse(
    argv: list[str], name: str, text: str | None, schema: type[Arguments], run: type[Section] = Section
) -> tuple[Arguments, Overrides]:
    """Parse the arguments of a command, validated, and the other settings of ``run``, not validated.

    If help is requested, prints it and ends the process. Raises ConfigError with one line per problem.
    """
    words, overrides = read_words(argv, name, text, schema, run)
    own: Overrides = {(word,): getattr(words, word) for (word,) in own_settings(schema)}
    of_run: Overrides = {}
    for key, value in overrides.items():
        (own if key[0] in schema.model_fields else of_run)[key] = value
    if words.config is not None:
        # Flags are refused in a file: a forgotten line ``overwrite`` would replace outputs in every later call.
        for key, line in read_file(words.config)[1].items():
            if key in own_settings(schema):
                raise ConfigError(f"{words.config}:{line}: {key[0]}: not a setting; use the option {_option(*key)}")
    try:
        return load_settings(schema, words.config, own), of_run
    except MissingError as error:
        raise ConfigError(f"{error}; {example_of(text, name)}") from None


def read_words(
    argv: list[str], command: str, text: str | None, schema: type[Command], run: type[Section] = Section
) -> tuple[argparse.Namespace, Overrides]:
    """Return the words, and the settings that override the file, not validated.

    ``config`` is one of the words: the file of settings, or None. Settings of ``run`` are accepted, but the help does
    not list them.
    """
    # Checked before the real parser, which would report missing or wrong arguments instead of printing the help.
    if {"-h", "--help"} & set(argv):
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        early.add_argument("--config")
        _Parser(command, schema, Section, text, early.parse_known_args(argv)[0].config).print_help()
        raise SystemExit(0)
    parser = _Parser(command, schema, run, text, None)
    # Unknown options first: argparse would take the value of a mistyped option for the target.
    parser.refuse_unknown(argv)
    # Intermixed: targets may come before, between and after options.
    words, unexpected = parser.parse_known_intermixed_args(argv)
    if unexpected:
        raise ConfigError(f"unexpected argument {' '.join(unexpected)}; {example_of(text, command)}")
    missing = [name.upper() for (name,) in own_settings(schema) if name not in words]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}; {example_of(text, command)}")
    overrides = {}
    for key, field in {**settings_of(run), **settings_of(schema)}.items():
        name = ".".join(key)
        if key not in own_settings(schema) and name in words:
            # Kept as text: pydantic converts it, and names the option if the value is invalid.
            overrides[key] = _value(field.annotation, getattr(words, name), f"--{name}")
    return words, overrides


def example_of(text: str | None, command: str) -> str:
    """Hint with the first example of a command's docstring."""
    examples = [line.strip() for line in (text or "").splitlines() if line.startswith("  esmeray ")]
    return f"for example: {examples[0] if examples else f'{program_of(command)} --help'}"


class _Parser(argparse.ArgumentParser):
    """argparse parser with one group per section. Errors are raised as ConfigError."""

    def __init__(
        self, command: str, schema: type[Command], run: type[Section], text: str | None, file: str | None
    ) -> None:
        # The command's own sections come last: they replace the experiment's section of the same name.
        self._sections = sections = {**sections_of(run), **sections_of(schema)}
        groups = {path: section for path, section in sections.items() if path and own_settings(section)}
        words = {name: field for (name,), field in own_settings(schema).items()}
        positional = {
            name: field for name, field in words.items() if field.is_required() or OPTIONAL_TARGET in field.metadata
        }
        targets = [name.upper() + " ..." * bool(list_type(field.annotation)) for name, field in positional.items()]
        settings = ["[--config FILE] [--section.key VALUE ...]"] if groups else []
        options = [f"[{_option(name)}]" for name in words if name not in positional]
        super().__init__(
            usage=_escaped(" ".join([program_of(command), *targets, *settings, *options])),
            description=text,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=38),
            allow_abbrev=False,  # --data.s would change its meaning with each new setting
            argument_default=argparse.SUPPRESS,  # options that are not given override nothing
        )
        self.set_defaults(config=None)
        for name, field in words.items():
            if name in positional:
                self.add_argument(
                    name,
                    # read_words reports a missing target with an example; argparse would print the usage.
                    nargs="*" if list_type(field.annotation) else "?",
                    metavar=name.upper(),
                    default=argparse.SUPPRESS if field.is_required() else field.default,
                    help=_help(field),
                )
            elif field.annotation is bool:
                self.add_argument(_option(name), dest=name, action="store_true", default=False, help=_help(field))
            else:
                self.add_argument(_option(name), dest=name, metavar="FILE", default=field.default, help=_help(field))
        if groups:
            self.add_argument(
                "--config", metavar="FILE", help="YAML file with the settings below; options override the file."
            )
        # With --config, the help shows the values of the file as defaults.
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
        """Raise ConfigError for unknown options, each with the closest known option."""
        known = self._option_string_actions
        names = [word.partition("=")[0] for word in argv if word.startswith("--")]  # --key=value is one word
        unknown = [
            f"unknown option {name}{self._removal_of(name) or did_you_mean(name, known)}"
            for name in names
            if name not in known
        ]
        if unknown:
            raise ConfigError(", ".join(unknown))

    def _removal_of(self, option: str) -> str | None:
        path = tuple(option.removeprefix("--").split("."))
        removals = (
            removal_of(section, path[len(start)])
            for start, section in self._sections.items()
            if start == path[: len(start)] != path
        )
        return next((f": {removal}" for removal in removals if removal), None)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with one line."""
        raise ConfigError(message.removeprefix("argument "))  # argparse would also print the usage, a full screen


def _option(name: str) -> str:
    return f"--{name.rstrip('_')}"  # json_, because pydantic's models have a method json


def _help(field: FieldInfo) -> str:
    return _escaped(" ".join((field.description or "").split()))


def _default(key: KeyPath, field: FieldInfo, values: Any) -> str:
    """Default of an option in words: the value of the file, otherwise the schema's."""
    for name in key:
        values = values.get(name, ...) if isinstance(values, dict) else ...
    if values is ...:
        if field.is_required():
            return "(required)"
        values = field.get_default(call_default_factory=True)
    # Values as they are typed, so that a default can be copied to the command line.
    items = values if isinstance(values, (list, tuple)) else [values]
    return _escaped(f"(default: {' '.join(_word(item) for item in items)})")


def _word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    """Escape percent signs, which argparse expands in the usage and in the help of an option."""
    return text.replace("%", "%%")


def _value(annotation: Any, words: str | list[str], option: str) -> Any:
    """Value of a setting on the command line, as text. ``none`` gives None or an empty list."""
    items = words if isinstance(words, list) else [words]
    if not items:
        raise ConfigError(f"{option}: a value is missing")
    optional = type(None) in get_args(annotation)
    # YAML has null and []; on the command line ``none`` stands for both.
    if (optional or list_type(annotation)) and [item.lower() for item in items] in (["none"], ["null"]):
        return None if optional else []
    return words
