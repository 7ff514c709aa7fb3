"""Load checked settings from a YAML file and overrides, for an experiment or a command.

Precedence: default < file < command line. File and overrides are merged first and checked once, so that rules over
several keys see the final values. Every error is one line with the file and line, or the option.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from esmeray.common.errors import ConfigError, did_you_mean, refusal, refuse_special
from esmeray.train_config.removed import removal_of, stored_in
from esmeray.train_config.section import KeyPath, Overrides, Section, Settings, is_section, sections_of, settings_of


class MissingError(ConfigError):
    """Settings without a default are missing."""


SHIPPED = Path(__file__).resolve().parent
"""Folder of the experiments that are shipped with the code."""

_DEEPEST = 100
_MAX_NODES = 100_000
"""Maximum number of mappings, lists and values, some hundred times as many as in a file of settings."""


def load_settings(
    schema: type[Settings],
    path: str | Path | None,
    overrides: Overrides | None = None,
    prefix: str = "",
    *,
    is_stored: bool = False,
) -> Settings:
    """Read, merge and check settings of a schema. Messages name their options, ``--PREFIXsection.key``.

    ``path`` may be None, for the defaults; ``train_config/NAME.yaml`` is found from any folder, also as NAME. The file
    of a run or an export, which ``is_stored``, may set what was removed since; a file of a user may not.
    Raises ConfigError with one line per problem, MissingError if the only problem is missing settings.
    """
    overrides = overrides or {}
    settings, lines = read_file(path) if path is not None else ({}, {})
    for name, field in schema.model_fields.items():
        if is_section(field.annotation) and field.is_required():
            settings.setdefault(name, {})  # so that the error names the missing setting, not the section
    # Merge before the check: an override may correct an error in the file.
    for key, value in overrides.items():
        _set(settings, key, value)
    try:
        return schema.model_validate(settings, context=stored_in(Path(path) if path and is_stored else None))
    except ValidationError as error:
        if all(detail["type"] == "missing" for detail in error.errors()):
            missing = (".".join(map(str, detail["loc"])) for detail in error.errors())
            raise MissingError(f"missing: {', '.join(f'--{prefix}{name}' for name in missing)}") from error
        problem = _Problems(schema, prefix, path, lines, overrides, settings_of(schema))
        # Each member of a union reports an error of its own: keep the last one.
        problems = {problem.key(e["loc"]) or e["msg"]: problem.describe(e) for e in error.errors()}
        raise ConfigError(*problems.values()) from error


def dump_config(config: Section) -> str:
    """Return the resolved settings as YAML, with every key."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the settings of a file, and the line of each."""
    path = Path(path)
    candidates = (path, SHIPPED.parent / path, SHIPPED / f"{path}.yaml")
    try:
        refuse_special(path)
        # Composed in addition to loading, because loaded values have no line numbers.
        text = next((file for file in candidates if file.is_file()), path).read_text(encoding="utf-8-sig")
        with suppress(ValueError):
            json.loads(text)
            text = text.replace("\t", " ")  # valid JSON has tabs between tokens only, where YAML refuses them
        node = yaml.compose(text, Loader=_BoundedLoader)
        settings = yaml.load(text, Loader=_BoundedLoader)
    except OSError as error:
        hint = did_you_mean(path.stem, (file.stem for file in SHIPPED.glob("*.yaml")))
        raise ConfigError(f"{path}: can't be read ({error.strerror}){hint}; for examples see {SHIPPED}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', error)})") from error
    if not settings or not isinstance(settings, dict):
        raise ConfigError(f"{path}: contains no settings; write them in sections such as 'batch:'")
    lines: dict[KeyPath, int] = {}
    _collect_lines(node, (), lines, path)
    return settings, lines


def _collect_lines(node: yaml.Node | None, prefix: KeyPath, lines: dict[KeyPath, int], path: str | Path | None) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if key in lines:  # PyYAML would silently use the last one
            raise ConfigError(f"{path}:{line}: {'.'.join(key)} is set twice, first on line {lines[key]}: remove one")
        lines[key] = line
        _collect_lines(value_node, key, lines, path)


def _set(settings: dict[str, Any], key: KeyPath, value: Any) -> None:
    for name in key[:-1]:
        if not isinstance(settings.get(name), dict):  # missing, or an empty section, which YAML reads as None
            settings[name] = {}
        settings = settings[name]
    settings[key[-1]] = value


@dataclass
class _Problems:
    """Formats pydantic's errors as lines for users."""

    schema: type[Section]
    prefix: str
    path: str | Path | None
    lines: dict[KeyPath, int]
    overrides: Overrides
    settings: dict[KeyPath, Any]

    def describe(self, error: Any) -> str:
        key = self.key(error["loc"])
        name = ".".join(key)
        location = f"{self.path}:{self.lines[key]}" if key in self.lines else self.path
        where = f"{location}: {name}" if location else name
        if overridden := self._overridden(key, error["msg"]):
            where = " ".join(f"--{self.prefix}{'.'.join(option)}" for option in overridden)
        if error["type"] == "extra_forbidden":
            if removal := removal_of(sections_of(self.schema).get(key[:-1], Section), key[-1]):
                return f"{where}: {removal}; delete the line"
            # Include sections: in `traning:` the section's name is misspelled.
            known = [".".join(k) for k in self.settings] + list(self.schema.model_fields)
            return f"{where}: unknown setting{did_you_mean(name, known)}"
        if error["input"] is None and key not in self.settings:
            return f"{where}: is empty: remove it, or add settings below it"
        return f"{where}: {refusal(error)}" if name or overridden else refusal(error)

    def _overridden(self, key: KeyPath, message: str) -> list[KeyPath]:
        """Return the options that an error concerns: of its setting, or the ones that a section's rule names."""
        names = {option: ".".join(option[len(key) :]) for option in self.overrides if option[: len(key)] == key}
        return [option for option, name in names.items() if re.search(rf"\b{re.escape(name)}\b", message) or not name]

    def key(self, location: tuple[int | str, ...]) -> KeyPath:
        """Return the part of pydantic's location that names a setting, without union members and list indices."""
        names = tuple(map(str, location))
        starts = (names[:length] for length in range(len(names), 0, -1))
        return next((start for start in starts if start in self.settings), names)


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds; every error is a YAMLError.

    PyYAML 6.0.3 recurses without a limit, and nine lines of aliases can stand for a billion values.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_nodes = 0
        self._nodes_of_anchored: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # read now, because composing consumes the event
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._num_nodes
        self._depth += 1
        self._num_nodes += 1
        if self._depth <= _DEEPEST and self._num_nodes <= _MAX_NODES:
            # Counted before construction: until then, a billion nodes of aliases are only nine lines.
            node = super().compose_node(parent, index)
            if is_alias and node not in self._nodes_of_anchored:
                raise yaml.composer.ComposerError(None, None, "an alias inside its own anchor", mark)
            self._num_nodes += self._nodes_of_anchored[node] if is_alias else 0
        if self._depth > _DEEPEST or self._num_nodes > _MAX_NODES:
            problem = f"more than {_MAX_NODES:,} values (with aliases expanded) or {_DEEPEST} levels"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        self._depth -= 1
        self._nodes_of_anchored[node] = self._num_nodes - before
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        try:
            return super().construct_document(node)
        except (ValueError, OverflowError) as error:  # an invalid date, an integer of 5,000 digits
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
