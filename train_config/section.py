"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

STORES = "stores"
"""Folder of the storage path in which made stores lie, beside the runs."""


def _not_the_stores(name: str) -> str:
    if name == STORES:
        raise ValueError(f"{name!r} is the folder of the stores that runs make: choose another name")
    return name


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), AfterValidator(_not_the_stores)]
"""Of a run or a search, in the storage path."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are fixed once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
