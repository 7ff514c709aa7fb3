"""docs/config.md: every setting with type, default and what it means, from the schemas."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from train_config.schema import Config
from train_config.section import Section
from train_config.tune_schema import TuneConfig

HEAD = """# Settings

Made from `train_config/schema.py` by `make docs`; a test checks that it is up to date.

A run is a YAML file with these sections and, on the command line, `--section.key VALUE`. The command line overrides
the file, the file the defaults. A list takes several values, in a file also a single one; on the command line `none`
clears an optional setting and empties a list. `python train_ray.py --config FILE --help` shows the same with the file's
values, `--dry-run` the resolved config and the plan.
"""


TUNE_HEAD = """
# Settings of a search

Made from `train_config/tune_schema.py`. They stand in a file of their own, which `train_ray.py --tune FILE` names, and
on the command line as `--tune.section.key VALUE`, with several values for a list. See [tuning](tuning.md).
"""


def config_reference() -> str:
    """The page as Markdown."""
    search = [_section(TuneConfig, "tune"), *_sections(TuneConfig, "tune.")]
    return HEAD + "".join(_sections(Config, "")) + TUNE_HEAD + "".join(search)


def _sections(model: type[BaseModel], prefix: str) -> list[str]:
    pages = []
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            pages += [_section(section, f"{prefix}{name}"), *_sections(section, f"{prefix}{name}.")]
    return pages


def _section(section: type[BaseModel], name: str) -> str:
    rows = [
        f"| `{key}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for key, field in section.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    about = (section.__doc__ or "").strip()
    table = "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows])
    return f"\n## {name}\n\n{about}\n\n{table}\n" if rows else f"\n## {name}\n\n{about}\n"


def _type(field: FieldInfo) -> str:
    bounds = [part for item in field.metadata if (part := _bound(item))]
    return _cell(" ".join([_type_name(field.annotation), *bounds]))


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return " ".join([_type_name(arguments[0]), *filter(None, map(_bound, arguments[1:]))])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type_name(a) for a in arguments)
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0])}"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]


def _bound(item: Any) -> str:
    if hasattr(item, "metadata"):  # pydantic's FieldInfo inside Annotated
        return " ".join(filter(None, map(_bound, item.metadata)))
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return " ".join(f"{sign} {getattr(item, name)}" for name, sign in signs.items() if hasattr(item, name))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
