"""Settings of contrastive learning."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from esmeray.train_config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class ContrastiveSection(Section):
    """Supervised contrastive learning of the backbone's mean vectors (Khosla et al. 2020), over all sequences of a
    step. The groups are data.labels, of kind multiclass, or multilabel if a protein is in several groups, e.g.
    pairs."""

    temperature: PositiveFloat = 0.07
    """Divisor of the cosines. The lower it is, the more the nearest sequences dominate the loss."""
    level_weights: list[NonNegativeFloat] = Field(default=[1.0], min_length=1)
    """Weights of a pair of sequences, by level: the label is equal, all but its last part, all but its last two parts,
    and so on. Parts are separated by dots: for b.82.2.13, weights 1 0.5 0.1 apply to family, superfamily and fold."""
    group_level: NonNegativeInt = 0
    """Level, from 0, whose groups steps are planned by: a step contains several members of a group."""
    group_members: Annotated[int, Field(ge=2)] = 4
    """Number of members of a group that are adjacent in a step."""

    @model_validator(mode="after")
    def _level_is_weighted(self) -> Self:
        if self.group_level >= len(self.level_weights):
            raise ValueError("group_level must be an index into level_weights, starting at 0")
        return self
