"""From a YAML file and dotted overrides to checked settings: an experiment's, or those of a search.

Precedence: default < file < command line. The two sources are merged first and checked once, so that a rule over
several keys sees what will really be used; every refusal is one line that names the file and line, or the option. An
experiment's options are ``--section.key``, those of a search ``--tune.section.key``.
"""

from __future__ import annotations

import difflib
import re
import sys
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from common.errors import ConfigError
from train_config.processor import computes_bf16
from train_config.schema import Config
from train_config.section import Section
from train_config.tune_schema import TuneConfig

KeyPath = tuple[str, ...]
Settings = TypeVar("Settings", bound=Section)

TUNE_PREFIX = "tune."
"""What the options of a search begin with, after the hyphens."""

_BACKBONE: KeyPath = ("model", "backbone")
_SIZES = ("layers", "hidden_size", "heads")


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """Read, merge and check an experiment's settings.

    Args:
        path: YAML file, or None for the defaults.
        overrides: what followed on the command line: ``--section.key VALUE`` or ``--section.key=VALUE``.

    Raises:
        ConfigError: one line a problem, naming file and line, or the option.
    """
    mistaken_for = (TuneConfig, "this looks like a search", "--tune")
    config = _load(Config, path, overrides or [], "", mistaken_for=mistaken_for)
    if "amp_dtype" in config.training.model_fields_set or config.ray.address is not None or computes_bf16():
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"amp_dtype": "none"})})


def load_tune_config(path: str | Path | None, overrides: list[str] | None = None) -> TuneConfig:
    """Read, merge and check the settings of a search.

    Args:
        path: YAML file, or None for the defaults.
        overrides: ``--tune.section.key VALUE [VALUE ...]`` or ``--tune.section.key=VALUE``.

    Raises:
        ConfigError: one line a problem, naming file and line, or the option.
    """
    mistaken_for = (Config, "this looks like an experiment", "--config")
    return _load(TuneConfig, path, overrides or [], TUNE_PREFIX, mistaken_for=mistaken_for)


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the experiment and those of a search, each with its values and in its order."""
    experiment: list[str] = []
    search: list[str] = []
    current = experiment
    for argument in arguments:
        if _is_option(argument):
            current = search if argument.removeprefix("--").startswith(TUNE_PREFIX) else experiment
        current.append(argument)
    return experiment, search


def _load(
    schema: type[Settings],
    path: str | Path | None,
    overrides: list[str],
    prefix: str,
    mistaken_for: tuple[type[Section], str, str],
) -> Settings:
    text = _read(Path(path)) if path is not None else ""
    settings, lines = _parse_yaml(text, path)
    other, looks_like, option = mistaken_for
    if settings and not set(settings) & set(schema.model_fields) and set(settings) <= set(other.model_fields):
        raise ConfigError(f"{path}: {looks_like}, which belongs to {option}")
    if path is not None and not settings:
        raise ConfigError(f"{path}: holds no settings")
    given = parse_overrides(overrides, schema, prefix)
    _drop_sizes(settings, given, path)
    for key, value in given.items():
        _set(settings, key, value)
    for key, annotation in known_keys(schema).items():
        _listed(settings, key, annotation)
    try:
        return schema.model_validate(settings)
    except ValidationError as error:
        problem = _Problems(schema, prefix, path, lines, given)
        # Each member of a union complains for itself: the last one says enough.
        problems = {problem.key(e["loc"]) or e["msg"]: problem.describe(e) for e in error.errors()}
        raise ConfigError(*problems.values()) from error


def dump_config(config: Section) -> str:
    """The resolved settings as YAML, every key present."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse_overrides(arguments: list[str], schema: type[BaseModel] = Config, prefix: str = "") -> dict[KeyPath, Any]:
    """``--section.key VALUE [VALUE ...]`` to key paths and raw values; the schema converts them.

    Args:
        arguments: what followed on the command line.
        schema: whose settings they are.
        prefix: what each option begins with, after the hyphens; no part of the key.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing or a superfluous value.
    """
    keys = known_keys(schema)
    found: dict[KeyPath, Any] = {}
    position = 0
    while position < len(arguments):
        option, equals, inline = arguments[position].partition("=")
        position += 1
        if not option.startswith("--"):
            raise ConfigError(f"{option}: expected an option like --batch.tokens 8192 (see --help)")
        values = [inline] if equals else []
        while position < len(arguments) and not _is_option(arguments[position]) and not equals:
            values.append(arguments[position])
            position += 1
        key = tuple(option.removeprefix("--").removeprefix(prefix).replace("-", "_").split("."))
        if key not in keys:
            hint = nearest(".".join(key), [".".join(k) for k in keys], prefix)
            raise ConfigError(f"{option}: no such setting{hint} (see --help)")
        found[key] = _convert(option, values, keys[key])
    return found


def known_keys(model: type[BaseModel] = Config, prefix: KeyPath = ()) -> dict[KeyPath, Any]:
    """Every key of the schema with the annotation of its value."""
    keys: dict[KeyPath, Any] = {}
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            keys |= known_keys(annotation, (*prefix, name))
        else:
            keys[(*prefix, name)] = annotation
    return keys


def _is_section(schema: type[BaseModel], key: KeyPath) -> bool:
    annotation: Any = schema
    for part in key:
        field = annotation.model_fields.get(part)
        annotation = field.annotation if field is not None else None
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return False
    return bool(key)


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """A closing remark that names the known word most like ``name``, after ``prefix``, or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _drop_sizes(settings: dict[str, Any], given: dict[KeyPath, Any], path: str | Path | None) -> None:
    """Drop a file's size of random weights where the command line names trained weights, which have their own."""
    source = given.get((*_BACKBONE, "source"))
    if not source or not ("/" in source or Path(source).expanduser().is_dir()):
        return
    section = _below(settings, _BACKBONE)
    dropped = [name for name in _SIZES if (*_BACKBONE, name) not in given and section.pop(name, None) is not None]
    if dropped:
        print(
            f"warning: {path}: {', '.join(dropped)} of model.backbone not used: the weights of {source} have their own",
            file=sys.stderr,
        )


def _listed(settings: dict[str, Any], key: KeyPath, annotation: Any) -> None:
    """Take a single value of a file for a list of one entry, where a list is due."""
    section = _below(settings, key[:-1])
    value = section.get(key[-1])
    if _list_type(annotation) is not None and isinstance(value, (str, int, float)):
        section[key[-1]] = [value]


def _below(settings: dict[str, Any], key: KeyPath) -> dict[str, Any]:
    """The settings of a section as the file has them; empty where it has none."""
    for part in key:
        inner = settings.get(part)
        settings = inner if isinstance(inner, dict) else {}
    return settings


def _list_type(annotation: Any) -> Any:
    """The list or tuple that a setting is, or may be."""
    members = (annotation, *typing.get_args(annotation))
    return next((member for member in members if typing.get_origin(member) in (list, tuple)), None)


def _is_option(argument: str) -> bool:
    return argument.startswith("--")


def _convert(option: str, values: list[str], annotation: Any) -> Any:
    if not values:
        raise ConfigError(f"{option}: a value is missing")
    optional = type(None) in typing.get_args(annotation)
    sequence = _list_type(annotation)
    # 'none' is also a precision: where it is a value of the list, only 'null' clears the setting.
    words = {"none", "null"} - set(typing.get_args(typing.get_args(sequence)[0]) if sequence else ())
    if (optional or sequence) and len(values) == 1 and values[0].lower() in words:
        return None if optional else []
    if sequence:
        return values
    if len(values) > 1:
        raise ConfigError(f"{option}: takes one value, {len(values)} given: {' '.join(values)}")
    return values[0]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text") from error


def _parse_yaml(text: str, path: str | Path | None) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: no valid YAML ({getattr(error, 'problem', error)})") from error
    if settings is None:
        return {}, {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold sections like 'batch:', found a {type(settings).__name__}")
    lines: dict[KeyPath, int] = {}
    _collect_lines(node, (), lines, path)
    return settings, lines


def _collect_lines(node: yaml.Node | None, prefix: KeyPath, lines: dict[KeyPath, int], path: str | Path | None) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{path}:{line}: {'.'.join(key)} is set twice, first in line {lines[key]}: remove one")
        lines[key] = line
        _collect_lines(value_node, key, lines, path)


def _set(settings: dict[str, Any], key: KeyPath, value: Any) -> None:
    for part in key[:-1]:
        inner = settings.get(part)
        if not isinstance(inner, dict):
            inner = settings[part] = {}
        settings = inner
    settings[key[-1]] = value


class _Problems:
    """Turns pydantic's errors into lines for a person."""

    def __init__(
        self,
        schema: type[BaseModel],
        prefix: str,
        path: str | Path | None,
        lines: dict[KeyPath, int],
        given: dict[KeyPath, Any],
    ) -> None:
        self._schema, self._prefix, self._path, self._lines, self._given = schema, prefix, path, lines, given
        self._keys = known_keys(schema)

    def describe(self, error: Any) -> str:
        """One line for one of pydantic's errors."""
        key = self.key(error["loc"])
        name = ".".join(key)
        message = error["msg"].removeprefix("Value error, ")
        if overridden := self._overridden(key, message):
            where = " ".join(f"--{self._prefix}{'.'.join(option)}" for option in overridden)
        elif key in self._lines:
            where = f"{self._path}:{self._lines[key]}: {name}"
        else:
            where = f"{self._path}: {name}" if self._path else name
        if error["type"] == "extra_forbidden":
            known = [".".join(k) for k in self._keys] + list(self._schema.model_fields)
            return f"{where}: no such setting{nearest(name, known)}"
        if error["input"] is None and _is_section(self._schema, key):
            return f"{where}: is empty: leave it out or name settings below it"
        if error["type"] == "value_error":
            return f"{where}: {message}" if name or overridden else message
        return f"{where}: {message[0].lower()}{message[1:]}, got {error['input']!r}"

    def _overridden(self, key: KeyPath, message: str) -> list[KeyPath]:
        """The options that an error concerns: of its setting, or those that a section's rule names."""
        names = {option: ".".join(option[len(key) :]) for option in self._given if option[: len(key)] == key}
        return [option for option, name in names.items() if re.search(rf"\b{re.escape(name)}\b", message) or not name]

    def key(self, location: tuple[int | str, ...]) -> KeyPath:
        """The part of pydantic's location that names a setting (it appends union members and list indices)."""
        for length in range(len(location), 0, -1):
            candidate = tuple(str(part) for part in location[:length])
            if candidate in self._keys:
                return candidate
        return tuple(str(part) for part in location)
