"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are fixed once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
