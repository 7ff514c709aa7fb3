"""Settings of contrastive learning."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from esmeray.train_config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class ContrastiveSection(Section):
    """Supervised contrastive learning of the backbone's mean vectors (Khosla et al. 2020), over all sequences of a
    step. The groups are data.labels, of kind multiclass, or multilabel where a protein is in several, as in pairs."""

    temperature: PositiveFloat = 0.07
    """Cosines are divided by it: the lower, the more do the nearest count."""
    level_weights: list[NonNegativeFloat] = Field(default=[1.0], min_length=1)
    """Weights of two sequences that share the label, that share all but its last part, all but its last two, and so on.
    Parts are separated by dots: of b.82.2.13, 1 0.5 0.1 are family, superfamily and fold."""
    group_level: NonNegativeInt = 0
    """Level, from 0, whose groups a step has several members of."""
    group_members: Annotated[int, Field(ge=2)] = 4
    """Members of a group that stand beside each other in a step."""

    @model_validator(mode="after")
    def _level_is_weighted(self) -> Self:
        if self.group_level >= len(self.level_weights):
            raise ValueError("group_level must be a level of level_weights, which count from 0")
        return self
