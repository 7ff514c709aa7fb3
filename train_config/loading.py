"""From a YAML file and dotted overrides to a checked :class:`~train_config.schema.Config`.

Precedence: default < file < command line. The two sources are merged first and checked once, so that a rule over
several keys sees what will really be used; every refusal is one line that names the file and line, or the option.
"""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from train_config.errors import ConfigError
from train_config.schema import Config
from train_config.section import Section

KeyPath = tuple[str, ...]


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """Read, merge and check.

    Args:
        path: YAML file, or None for the defaults.
        overrides: what followed on the command line: ``--section.key VALUE`` or ``--section.key=VALUE``.

    Raises:
        ConfigError: one line a problem, naming file and line, or the option.
    """
    text = _read(Path(path)) if path is not None else ""
    settings, lines = _parse_yaml(text, path)
    given = parse_overrides(overrides or [])
    for key, value in given.items():
        _set(settings, key, value)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        # Each member of a union complains for itself: the last one says enough.
        problems = {_schema_key(e["loc"]) or e["msg"]: _describe(e, path, lines, given) for e in error.errors()}
        raise ConfigError("\n".join(problems.values())) from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every key present."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse_overrides(arguments: list[str]) -> dict[KeyPath, Any]:
    """``--section.key VALUE [VALUE ...]`` to key paths and raw values; the schema converts them.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing or a superfluous value.
    """
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
        key = tuple(option.removeprefix("--").replace("-", "_").split("."))
        found[key] = _convert(option, values, _annotation(key, option))
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


def nearest(name: str, known: list[str]) -> str:
    """A closing remark that names the known word most like ``name``, or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _is_option(argument: str) -> bool:
    return argument.startswith("--")


def _annotation(key: KeyPath, option: str) -> Any:
    keys = known_keys()
    if key not in keys:
        raise ConfigError(
            f"{option}: no such setting{nearest('.'.join(key), ['.'.join(k) for k in keys])} (see --help)"
        )
    return keys[key]


def _convert(option: str, values: list[str], annotation: Any) -> Any:
    if not values:
        raise ConfigError(f"{option}: a value is missing")
    if typing.get_origin(annotation) in (list, tuple):
        return values
    if len(values) > 1:
        raise ConfigError(f"{option}: takes one value, {len(values)} given: {' '.join(values)}")
    optional = type(None) in typing.get_args(annotation)
    return None if optional and values[0].lower() in ("none", "null") else values[0]


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


def _describe(error: Any, path: str | Path | None, lines: dict[KeyPath, int], given: dict[KeyPath, Any]) -> str:
    """One line for one of pydantic's errors."""
    key = _schema_key(error["loc"])
    name = ".".join(key)
    if key in given:
        where = f"--{name}"
    elif key in lines:
        where = f"{path}:{lines[key]}: {name}"
    else:
        where = f"{path}: {name}" if path else name
    if error["type"] == "extra_forbidden":
        section = [".".join(k) for k in known_keys()] + list(Config.model_fields)
        return f"{where}: no such setting{nearest(name, section)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {message}" if name else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def _schema_key(location: tuple[int | str, ...]) -> KeyPath:
    """The part of pydantic's location that names a setting (it appends union members and list indices)."""
    keys = known_keys()
    for length in range(len(location), 0, -1):
        candidate = tuple(str(part) for part in location[:length])
        if candidate in keys:
            return candidate
    return tuple(str(part) for part in location)
