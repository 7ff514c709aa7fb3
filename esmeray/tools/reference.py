"""docs/config.md: every setting with type, default and description. ``make docs`` generates it from the schemas."""

import typing
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from esmeray.tools.__main__ import ALONE, COMMANDS, subcommands
from esmeray.tools.grammar import Command
from esmeray.train_config.section import Section, is_section, metavar, own_settings, sections_of
from esmeray.training.config import Config
from esmeray.tuning.section import TuneConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"

HEAD = """# Settings

`make docs` generates this page from the settings' sections, which are in the `section.py` of each package.
`esmeray/training/config.py` combines the sections of an experiment.

A run is configured by a YAML file with these sections and by options `--section.key VALUE`. Options override the file,
and the file overrides the defaults. A list takes several values. On the command line, `none` clears an optional setting
and empties a list. `esmeray train --config FILE --help` shows this page with the file's values, and `--dry_run` prints
the resolved config and the plan.
"""

TUNE_HEAD = """
# Settings of a search

These are in a separate file (`esmeray tune --tune FILE`), or on the command line as `--tune.section.key VALUE`, with
several values for a list. See [tuning](tuning.md).
"""


COMMANDS_HEAD = """
# Settings of commands

Set them as `--section.key VALUE`, or in a file given by `--config`. Sections that experiments have too are described
above. Settings that several commands have come first; each of these commands links to them.
"""

Sections = dict[type[Section], str]
"""Heading of each class whose settings several sections inherit."""


def config_reference() -> str:
    """Return docs/config.md as Markdown."""
    page = HEAD + _sections(Config, "", {}) + TUNE_HEAD + _sections(TuneConfig, "tune", {}) + COMMANDS_HEAD
    commands = command_schemas()
    shared = _shared([section for schema in commands.values() for section in own_sections(schema).values()])
    for section, heading in shared.items():
        page += f"\n## {heading}\n{_table(_declared(section)[section])}"
    for command, schema in commands.items():
        page += f"\n`esmeray {command}`\n"
        for name, section in own_sections(schema).items():
            page += _sections(section, name, shared)
    return page


def own_sections(schema: type[Section]) -> dict[str, type[Section]]:
    """Return a command's sections. An experiment's are left out: they have the same meaning there."""
    return {
        name: field.annotation
        for name, field in schema.model_fields.items()
        if name not in Config.model_fields and is_section(field.annotation)
    }


def command_schemas() -> dict[str, type[Command]]:
    """Schemas of the commands that have sections of their own, by command name."""
    schemas = {}
    for command in COMMANDS:
        alone = ["run"] if command in ALONE else []
        for module in alone + subcommands(command):
            loaded = import_module(f"esmeray.tools.{command}.{module}")
            schema = getattr(loaded.main, "schema", getattr(loaded, "Arguments", Command))
            if own_sections(schema):
                schemas[command if module in alone else f"{command} {module}"] = schema
    return schemas


def _declared(section: type[Section]) -> dict[type[Section], dict[str, FieldInfo]]:
    """Settings of a section by the class that declares them, the section itself or one of its bases."""
    declared: dict[type[Section], dict[str, FieldInfo]] = {}
    for (name,), field in own_settings(section).items():
        owner = next(base for base in section.__mro__ if name in vars(base).get("__annotations__", {}))
        declared.setdefault(owner, {})[name] = field
    return declared


def _shared(sections: list[type[Section]]) -> Sections:
    """Headings of the classes that declare settings of several of these sections."""
    number = Counter(owner for section in sections for owner in _declared(section))
    return {owner: (owner.__doc__ or "").partition(".")[0] for owner, count in number.items() if count > 1}


def _sections(schema: type[Section], name: str, shared: Sections) -> str:
    """Tables of a schema and of the sections in it, with links to shared settings."""
    page = ""
    for path, section in sections_of(schema).items():
        title = ".".join((name, *path)).lstrip(".")
        page += f"\n## {title}\n\n{(section.__doc__ or '').strip()}\n" if title else ""
        own: dict[str, FieldInfo] = {}
        for owner, settings in _declared(section).items():
            if owner in shared:
                anchor = shared[owner].lower().replace(",", "").replace(" ", "-")  # as GitHub makes it from a heading
                page += f"\nAlso `{'`, `'.join(settings)}`: see [{shared[owner]}](#{anchor}).\n"
            else:
                own |= settings
        page += _table(own)
    return page


def _table(settings: dict[str, FieldInfo]) -> str:
    rows = [
        f"| `{key}` | {_type(field)} | {_default(field)} | {_cell(' '.join((field.description or '').split()))} |"
        for key, field in settings.items()
    ]
    return "\n".join(["", "| key | type | default | |", "|---|---|---|---|", *rows, ""]) if rows else ""


def _type(field: FieldInfo) -> str:
    return _cell(" ".join([f"`{metavar(field.annotation)}`", *_bounds(field), *_bounds(field.annotation)]))


def _bounds(item: Any) -> list[str]:
    """Limits of a setting's value, including the limits of list items and of optional values."""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [f"{sign} {getattr(item, name)}" for name, sign in signs.items() if hasattr(item, name)]
    # pydantic keeps limits in a field's ``metadata``, Annotated in ``__metadata__``, and unions contain Annotated.
    for inner in (*getattr(item, "metadata", ()), *getattr(item, "__metadata__", ()), *typing.get_args(item)):
        bounds += _bounds(inner)
    return list(dict.fromkeys(bounds))  # members of a union repeat limits


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # an unescaped | would end the cell


if __name__ == "__main__":
    PAGE.write_text(config_reference(), encoding="utf-8")
