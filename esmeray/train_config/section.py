"""Building blocks of the settings' sections."""

import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from esmeray.common.errors import ConfigError
from esmeray.common.processor import default_precision
from esmeray.common.text import refusal

KeyPath = tuple[str, ...]
Overrides = dict[KeyPath, Any]
"""Settings given on the command line: texts, or None and [] for what ``none`` clears."""


def overrides_of(settings: Mapping[str, Any] | None) -> Overrides:
    """Settings of a function of Python, by their dotted names."""
    return {tuple(str(name).split(".")): value for name, value in (settings or {}).items()}


DEFAULT_TOKENS = 8192
"""Budget of a batch, special tokens included, of training and of what a head predicts."""

STORES = "stores"
"""Folder of the storage path in which made stores lie, beside the runs."""


def _is_folder_name(name: str) -> str:
    # It becomes a part of paths, of URIs and of commands that are printed to be typed.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"{name!r} is no name of a folder: use letters, digits, '.', '_' and '-', with a letter or digit first"
        )
    if name == STORES:  # which lies among the runs
        raise ValueError(f"{name!r} is the folder of the stores that runs make: choose another name")
    return name


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
# Bounded: some digits too many would else be found out by the machine's memory.
Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""Tokens of a micro-batch or a sequence."""
Channels = Annotated[int, Field(gt=0, le=2**16)]
"""Also layers, heads, processes and other sizes of which no machine holds more."""
Precision = Literal["fp32", "bf16", "fp16"]
Stream = bool | Literal["auto"]
"""Of layers: read as they are needed; auto: where memory does not suffice."""
Weights = Literal["stored", "int8"]
"""Of layers: as they are stored, or of 8 bits with a scale for each output channel."""
OneOrMore = BeforeValidator(lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value)
"""Of a setting that is one value or a list: on the command line both are lists."""
FolderName = Annotated[str, AfterValidator(_is_folder_name)]
"""Name of a run or a search, in the storage path."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are fixed once checked, and the text below a setting is
    its description."""

    # Namespaces: model.NAME is a section here, and pydantic would warn of model_ in the name of a field.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """The section with these arguments of a function of Python. Raises ConfigError, which names each wrong one."""
        try:
            return cls(**arguments)
        except ValidationError as error:
            # Each member of a union complains for itself: the last one says enough.
            problems = {problem["loc"][:1]: refusal(problem) for problem in error.errors()}
            raise ConfigError(*(f"{'.'.join(map(str, key))}: {text}" for key, text in problems.items())) from error

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        # Here and not in each setting: `source: a.fasta` is what everybody writes first.
        is_list = list_type(cls.model_fields[str(info.field_name)].annotation) is not None
        return [value] if is_list and isinstance(value, (str, int, float)) else value


class Compute(NamedTuple):
    """Precision and token budget that a computation has on its device."""

    precision: Precision
    tokens: int


class ComputeSection(Section):
    """Device and precision of a computation, and its batches."""

    device: str | None = None
    """Device that computes: cpu, cuda, cuda:1 ... Default: CUDA where there is one."""
    precision: Precision | None = None
    """Precision of the computation. Default: bf16; fp32 if a processor that computes has no instructions for bf16."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    stream: Stream = "auto"
    """Read the layers of an ESM-2 again for every 16,384 tokens, in place of holding them in memory: always, never, or
    where memory does not suffice. The results are the same."""
    weights: Weights = "stored"
    """Weights of the layers of an ESM-2: stored; int8: rounded to 8 bits, in half the memory and the bytes of bf16, for
    other vectors, which are very near."""

    def resolved(self, on_cuda: bool) -> Compute:
        """The same with the defaults of the device, which is of this machine."""
        precision = self.precision or default_precision(on_cuda)
        # On the CPU a small batch stays in the cache; a GPU needs a large one to be busy.
        return Compute(precision, self.tokens or (65_536 if on_cuda else 2_048))


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Test for the type of a section, whose settings lie below it."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def sections_of(schema: type[Section], path: KeyPath = ()) -> dict[KeyPath, type[Section]]:
    """The schema and every section below it, outer ones first."""
    sections = {path: schema}
    for name, field in schema.model_fields.items():
        if is_section(field.annotation):
            sections |= sections_of(field.annotation, (*path, name))
    return sections


def own_settings(section: type[Section], path: KeyPath = ()) -> dict[KeyPath, FieldInfo]:
    """The settings of a section at this path, without those of sections below it."""
    return {(*path, name): field for name, field in section.model_fields.items() if not is_section(field.annotation)}


def settings_of(schema: type[Section]) -> dict[KeyPath, FieldInfo]:
    """Every setting of a schema."""
    sections = sections_of(schema).items()
    return {key: field for path, section in sections for key, field in own_settings(section, path).items()}


def list_type(annotation: Any) -> Any:
    """The list or tuple that a setting is, or may be; None otherwise."""
    members = (annotation, *typing.get_args(annotation))  # those of list[int] | None, too
    return next((member for member in members if typing.get_origin(member) in (list, tuple)), None)


def may_be_none(annotation: Any) -> bool:
    """Test for a setting that can be cleared."""
    return type(None) in typing.get_args(annotation)


def metavar(annotation: Any) -> str:
    """Placeholder of a setting's value in the help, such as ``INT`` or ``{bf16,fp16,none}``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is Annotated:
        return metavar(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return "|".join("none" if member is type(None) else metavar(member) for member in arguments)
    names = {int: "INT", float: "FLOAT", bool: "{true,false}", Path: "PATH"}
    return f"{metavar(arguments[0])} ..." if origin in (list, tuple) else names.get(annotation, "TEXT")
