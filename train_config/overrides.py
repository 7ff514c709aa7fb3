"""Settings on the command line, as ``--section.key VALUE``: tyro reads them, the schema checks them later.

In: a command's own arguments and the sections whose settings may follow. Out: the arguments, and of each section the
settings that were given, as raw text: file and command line are merged before anything is checked.
"""

from __future__ import annotations

import typing
from dataclasses import field as dataclass_field
from dataclasses import make_dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from common.arguments import parse
from train_config.schema import Config
from train_config.section import KeyPath, Overrides, Section, is_section, list_type, metavar

Arguments = TypeVar("Arguments")


class _Given(NamedTuple):
    value: str | list[str] | None


def parse_with_settings(
    kind: type[Arguments], argv: list[str], tool: str, description: str | None = None
) -> tuple[Arguments, Overrides]:
    """A tool's own arguments and the settings of the experiment among them; the help has its own alone."""
    if {"-h", "--help"} & set(argv):
        parse(kind, ["--help"], tool, description)
    arguments, overrides = parse_sections(kind, argv, tool, description, {"": Config()}, use_underscores=False)
    return arguments, overrides[""]


def parse_sections(
    kind: type[Arguments],
    argv: list[str],
    tool: str,
    description: str | None,
    sections: dict[str, Section],
    use_underscores: bool = True,
) -> tuple[Arguments, dict[str, Overrides]]:
    """A command's own arguments, and what was given of each of the sections, which go by the prefix of their options.

    The help shows the sections' values as defaults, and options with underscores as in YAML or with hyphens; either is
    understood. Raises ConfigError for an argument that is missing, unknown or wrong.
    """
    members: list[Any] = [("own", Annotated[kind, tyro.conf.arg(name="")])]
    for prefix, section in sections.items():
        annotation: Any = Annotated[type(section), tyro.conf.arg(name=prefix)]
        members.append((f"settings_{prefix}", annotation, dataclass_field(default=section)))
    command = make_dataclass("Command", members)
    registry = ConstructorRegistry()
    registry.struct_rule(_section_rule)
    parsed = parse(command, argv, tool, description, registry=registry, use_underscores=use_underscores)
    return parsed.own, {prefix: _flat(getattr(parsed, f"settings_{prefix}")) for prefix in sections}


def _flat(given: dict[str, Any], prefix: KeyPath = ()) -> Overrides:
    """The settings that were given, by their path."""
    found: Overrides = {}
    for name, value in given.items():
        found |= {(*prefix, name): value.value} if isinstance(value, _Given) else _flat(value, (*prefix, name))
    return found


def _section_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """tyro's rule for a section: a nested dictionary of the settings that were given, as text."""
    if not is_section(info.type):
        return None
    fields = [
        StructFieldSpec(
            name=name,
            type=annotation if is_section(annotation := field.annotation) else _raw(annotation),
            default=getattr(info.default, name),
            helptext=" ".join((field.description or annotation.__doc__ or "").split()),
        )
        for name, field in info.type.model_fields.items()
    ]
    return StructConstructorSpec(instantiate=_given_alone, fields=tuple(fields))


def _given_alone(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (_Given, dict))}


def _raw(annotation: Any) -> Any:
    """A setting's type for tyro: one text, or several for a list."""
    rule: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*" if list_type(annotation) else 1,
        metavar=metavar(annotation),
        instance_from_str=partial(_given, annotation),
        is_instance=lambda _: True,
        str_from_instance=_words,
    )
    return Annotated[Any, rule]


def _given(annotation: Any, values: list[str]) -> _Given:
    """The text that was given for a setting; None or an empty list where it says ``none``."""
    if not values:
        raise ValueError("a value is missing")
    optional = type(None) in typing.get_args(annotation)
    sequence = list_type(annotation)
    if (optional or sequence) and len(values) == 1 and values[0].lower() in ("none", "null"):
        return _Given(None if optional else [])
    return _Given(values if sequence else values[0])


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return ["none" if one is None else str(one).lower() if isinstance(one, bool) else str(one) for one in values]
