"""Building blocks for sections of settings: types, natures and the base class.

Natures are metadata of schema fields (``Annotated[int, UNSEEN]``): the effect of a change on a run that is resumed, and
the kind of path. A section's nature applies to all of its fields that have none. The launcher and the resume check read
natures here, so a new setting is declared in one place.
"""

import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,  # noqa: F401 - sections import the types of their numbers from here
    NonNegativeInt,  # noqa: F401
    PositiveFloat,  # noqa: F401
    PositiveInt,  # noqa: F401
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from esmeray.common.errors import ConfigError, expanded, refusal
from esmeray.common.processor import default_precision
from esmeray.common.remote import uri_of
from esmeray.train_config.removed import removal_of, without_removed

KeyPath = tuple[str, ...]
Overrides = dict[KeyPath, Any]
"""Settings from the command line: texts; None or [] if set to ``none``."""


def overrides_of(settings: Mapping[str, Any] | None) -> Overrides:
    """Settings of a function of Python, by their dotted names."""
    return {tuple(str(name).split(".")): value for name, value in (settings or {}).items()}


DEFAULT_TOKENS = 8192
"""Default token budget of a batch, special tokens included, for training and for prediction by a head."""

STORES = "stores"
"""Folder of generated stores in the storage path, next to the runs."""


def _is_folder_name(name: str) -> str:
    # The name becomes part of paths, URIs and printed commands.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"{name!r} is not a valid folder name: use letters, digits, '.', '_' and '-', starting with a "
            "letter or digit"
        )
    if name == STORES:  # this folder is next to the runs
        raise ValueError(f"{name!r} is reserved for the stores that runs create: choose another name")
    return name


Share = Annotated[float, Field(ge=0, lt=1)]
Coverage = Annotated[float, Field(ge=0.01, le=0.999)]
# Bounded, because a typo of a few digits would otherwise end in out of memory.
Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""Number of tokens in a micro-batch or a sequence."""
Channels = Annotated[int, Field(gt=0, le=2**16)]
"""Number of channels, layers, heads, processes and similar sizes, far above any real one."""
Precision = Literal["fp32", "bf16", "fp16"]
Stream = bool | Literal["auto"]
"""Reading of layers on demand; auto: if memory is too small to hold them."""
Weights = Literal["stored", "int8"]
"""Weights of layers: as stored, or 8 bits with a scale per output channel."""
OneOrMore = BeforeValidator(lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value)
"""Validator for a setting that is one value or a list; on the command line both are lists."""
FolderName = Annotated[str, AfterValidator(_is_folder_name)]
"""Name of a run or a search, a folder in the storage path."""


class OnResume(Enum):
    """Effect of a changed setting on a run that has started."""

    FIXED = "refused once there is a checkpoint"
    FREE = "allowed, with a remark, until the run is finished"
    END = "allowed, with a remark: it says when training ends"
    UNSEEN = "allowed at any time: the result does not show it"


FIXED, FREE, END, UNSEEN = OnResume


class PathKind(Enum):
    """Meaning of a relative path. Workers run in other folders and need absolute paths."""

    PATH = "of the current folder"
    PATH_OR_NAME = "of the current folder, where it is one; else a name"
    LINKED_PATH = "of the current folder; links stay, as Kubernetes mounts a secret by links that differ between nodes"


PATH, PATH_OR_NAME, LINKED_PATH = PathKind


class Section(BaseModel):
    """Base class of sections. Unknown keys are refused, values are immutable, and the docstring below a setting is its
    description."""

    # protected_namespaces: pydantic would warn about field names that start with model_, but model is a section here.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """Build a section from arguments of a Python call. Raises ConfigError with one line per wrong argument."""
        try:
            return cls(**arguments)
        except ValidationError as error:
            # Each member of a union reports an error of its own: keep the last one.
            problems = {
                problem["loc"][:1]: removal_of(cls, "".join(map(str, problem["loc"][:1]))) or refusal(problem)
                for problem in error.errors()
            }
            raise ConfigError(*(f"{'.'.join(map(str, key))}: {text}" for key, text in problems.items())) from error

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any, info: ValidationInfo) -> Any:
        return without_removed(cls, values, info.context) if isinstance(values, dict) else values

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        # For all list settings: `source: a.fasta` is the natural way to write one value.
        is_list = list_type(cls.model_fields[str(info.field_name)].annotation) is not None
        return [value] if is_list and isinstance(value, (str, int, float)) else value


Settings = TypeVar("Settings", bound=Section)
Nature = TypeVar("Nature", bound=Enum)


class Compute(NamedTuple):
    """Resolved precision and token budget of a computation on its device."""

    precision: Precision
    tokens: int


class ComputeSection(Section):
    """Device, precision and batches of a computation."""

    device: str | None = None
    """Device of the computation: cpu, cuda, cuda:1 ... Default: CUDA if available."""
    precision: Precision | None = None
    """Precision of the computation. Default: bf16, or fp32 if the CPU that computes has no bf16 instructions."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""

    def resolved(self, on_cuda: bool) -> Compute:
        """Return the settings with the defaults of the device, for this machine."""
        precision = self.precision or default_precision(on_cuda)
        # A small batch stays in the CPU's cache; a GPU needs a large one to be busy.
        return Compute(precision, self.tokens or (65_536 if on_cuda else 2_048))


class LargeModelSection(ComputeSection):
    """Device, precision, batches, and how the layers of a large model are held."""

    stream: Stream = "auto"
    """Read the layers of an ESM-2 from disk for every 16,384 tokens instead of keeping them in memory: true, false, or
    auto: if memory is too small. The results are the same."""
    weights: Weights = "stored"
    """Weights of the layers of an ESM-2. stored: as in the checkpoint; int8: rounded to 8 bits, half the memory and
    bytes of bf16; the vectors differ slightly."""


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Return whether a setting's type is a section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def sections_of(schema: type[Section], path: KeyPath = ()) -> dict[KeyPath, type[Section]]:
    """Return the schema and all sections below it, outer ones first."""
    sections = {path: schema}
    for name, field in schema.model_fields.items():
        if is_section(field.annotation):
            sections |= sections_of(field.annotation, (*path, name))
    return sections


def own_settings(section: type[Section], path: KeyPath = ()) -> dict[KeyPath, FieldInfo]:
    """Return the settings of a section at this path, without its subsections."""
    return {(*path, name): field for name, field in section.model_fields.items() if not is_section(field.annotation)}


def settings_of(schema: type[Section]) -> dict[KeyPath, FieldInfo]:
    """Return all settings of a schema."""
    sections = sections_of(schema).items()
    return {key: field for path, section in sections for key, field in own_settings(section, path).items()}


def list_type(annotation: Any) -> Any:
    """Return the list or tuple type that a setting is or may be; None otherwise."""
    members = (annotation, *typing.get_args(annotation))  # also finds list[int] in list[int] | None
    return next((member for member in members if typing.get_origin(member) in (list, tuple)), None)


def metavar(annotation: Any) -> str:
    """Return the placeholder of a setting's value in the help, e.g. ``INT`` or ``{bf16,fp16,none}``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is Annotated:
        return metavar(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return "|".join("none" if member is type(None) else metavar(member) for member in arguments)
    names = {int: "INT", float: "FLOAT", bool: "{true,false}", Path: "PATH"}
    return f"{metavar(arguments[0])} ..." if origin in (list, tuple) else names.get(annotation, "TEXT")


def on_resume(schema: type[Section], key: str) -> OnResume:
    """Return the nature of a dotted key: its own, otherwise the innermost enclosing section's."""
    nature = FREE
    section: Any = schema
    for name in key.split("."):
        if not is_section(section) or name not in section.model_fields:
            break  # a key of an older version, or inside a setting that is a mapping
        field = section.model_fields[name]
        nature = _metadata(field, OnResume) or nature
        section = field.annotation
    return nature


def with_absolute_paths(section: Settings) -> Settings:
    """Return the settings with absolute paths, for processes in other folders, maybe on other nodes."""
    changes: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        absolute = value
        if isinstance(value, Section):
            absolute = with_absolute_paths(value)
        elif isinstance(value, list):
            absolute = [with_absolute_paths(item) if isinstance(item, Section) else item for item in value]
        elif value is not None and (kind := _metadata(field, PathKind)) is not None:
            absolute = absolute_path(value, kind)
        if absolute != value:  # otherwise every section would be copied, and its fields would count as set
            changes[name] = absolute
    return section.model_copy(update=changes)


def absolute_path(value: str, kind: PathKind = PATH) -> str:
    """Return an absolute path, without symbolic links except for LINKED_PATH. Names and URIs stay as they are."""
    if (uri := uri_of(value)) is not None:
        return uri
    path = expanded(value)  # expanded here, because a worker may be another user, with another home
    if kind is PATH_OR_NAME and not path.exists():
        return value
    return str(path.absolute() if kind is LINKED_PATH else path.resolve())


def _metadata(field: FieldInfo, kind: type[Nature]) -> Nature | None:
    return next((item for item in field.metadata if isinstance(item, kind)), None)
