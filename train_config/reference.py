"""docs/config.md: every setting with type, default and what it means, from the schemas; ``make docs`` writes it."""

import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from train_config.command_schema import COMMANDS
from train_config.schema import Config
from train_config.section import is_section, metavar
from train_config.tune_schema import TuneConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

HEAD = """# Settings

Made from `train_config/schema.py` by `make docs`; a test checks that it is up to date.

A run is a YAML file with these sections and, on the command line, `--section.key VALUE`. The command line overrides
the file, the file the defaults. A list takes several values, in a file also a single one; on the command line `none`
clears an optional setting and empties a list. `esmeray train --config FILE --help` shows the same with the file's
values, `--dry_run` the resolved config and the plan.
"""

TUNE_HEAD = """
# Settings of a search

Made from `train_config/tune_schema.py`. They stand in a file of their own, which `train_ray.py --tune FILE` names, and
on the command line as `--tune.section.key VALUE`, with several values for a list. See [tuning](tuning.md).
"""


COMMANDS_HEAD = """
# Settings of commands

Made from `train_config/command_schema.py`. Each is `--section.key VALUE`, or stands in a file that `--config` names.
Sections that an experiment has as well are described above.
"""


def config_reference() -> str:
    """The page as Markdown."""
    commands = "".join(_command(name, schema) for name, schema in COMMANDS.items())
    return HEAD + _section(Config, "") + TUNE_HEAD + _section(TuneConfig, "tune") + COMMANDS_HEAD + commands


def _command(name: str, schema: type[BaseModel]) -> str:
    """The sections that are the command's own."""
    fields = schema.model_fields.items()
    own: dict[str, Any] = {key: field.annotation for key, field in fields if key not in Config.model_fields}
    return f"\n`esmeray {name}`\n" + "".join(_section(section, key) for key, section in own.items())


def _section(section: type[BaseModel], name: str) -> str:
    """A section's table, and those of the sections in it."""
    inner = {key: field.annotation for key, field in section.model_fields.items() if is_section(field.annotation)}
    rows = [
        f"| `{key}` | {_type(field)} | {_default(field)} | {_cell(' '.join((field.description or '').split()))} |"
        for key, field in section.model_fields.items()
        if key not in inner
    ]
    table = "\n".join(["", "| key | type | default | |", "|---|---|---|---|", *rows, ""]) if rows else ""
    page = f"\n## {name}\n\n{(section.__doc__ or '').strip()}\n{table}" if name else table
    return page + "".join(_section(part, f"{name}.{key}".lstrip(".")) for key, part in inner.items())


def _type(field: FieldInfo) -> str:
    return _cell(" ".join([f"`{metavar(field.annotation)}`", *_bounds(field), *_bounds(field.annotation)]))


def _bounds(item: Any) -> list[str]:
    """Limits of a setting's value, also of those in a list or beside none."""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [f"{sign} {getattr(item, name)}" for name, sign in signs.items() if hasattr(item, name)]
    inner = [*getattr(item, "metadata", ()), *getattr(item, "__metadata__", ()), *typing.get_args(item)]
    return list(dict.fromkeys([*found, *(bound for part in inner for bound in _bounds(part))]))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(config_reference(), encoding="utf-8")
