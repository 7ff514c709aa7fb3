"""docs/config.md: every setting with type, default and description. ``make docs`` generates it from the schemas."""

import typing
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
above.
"""


def config_reference() -> str:
    """Return docs/config.md as Markdown."""
    page = HEAD + _sections(Config, "") + TUNE_HEAD + _sections(TuneConfig, "tune") + COMMANDS_HEAD
    for command, schema in command_schemas().items():
        page += f"\n`esmeray {command}`\n"
        for name, field in schema.model_fields.items():
            # Sections of an experiment have the same meaning here, and are described above.
            if is_section(field.annotation) and name not in Config.model_fields:
                page += _sections(field.annotation, name)
    return page


def command_schemas() -> dict[str, type[Command]]:
    """Schemas of the commands that have sections of their own, by command name."""
    schemas = {}
    for command in COMMANDS:
        alone = ["run"] if command in ALONE else []
        for module in alone + subcommands(command):
            loaded = import_module(f"esmeray.tools.{command}.{module}")
            schema = getattr(loaded.main, "schema", getattr(loaded, "Arguments", Command))
            # Commands without sections of their own have no settings to describe.
            sections = {name for name, field in schema.model_fields.items() if is_section(field.annotation)}
            if sections - Config.model_fields.keys():
                schemas[command if module in alone else f"{command} {module}"] = schema
    return schemas


def _sections(schema: type[Section], name: str) -> str:
    """Tables of a schema and of the sections in it."""
    page = ""
    for path, section in sections_of(schema).items():
        title = ".".join((name, *path)).lstrip(".")
        rows = [
            f"| `{key}` | {_type(field)} | {_default(field)} | {_cell(' '.join((field.description or '').split()))} |"
            for (key,), field in own_settings(section).items()
        ]
        page += f"\n## {title}\n\n{(section.__doc__ or '').strip()}\n" if title else ""
        page += "\n".join(["", "| key | type | default | |", "|---|---|---|---|", *rows, ""]) if rows else ""
    return page


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
