"""Natures of settings: the kind of path, and the effect of a change on a run that is resumed.

Natures are metadata of schema fields (``Annotated[int, UNSEEN]``). A section's nature applies to all of its fields
that have none. The launcher and the resume check read natures here, so a new setting is declared in one place.
"""

from enum import Enum
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from esmeray.common.errors import expanded
from esmeray.common.remote import uri_of
from esmeray.train_config.section import Section, Settings, is_section

Nature = TypeVar("Nature", bound=Enum)


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
