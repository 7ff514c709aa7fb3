"""Settings of masked language modelling."""

from typing import Annotated

from pydantic import Field, model_validator

from esmeray.train_config.section import PositiveInt, Section


class MaskedLMSection(Section):
    """Masked language modelling (Devlin et al. 2019), with the default shares of ESM-2 (Lin et al. 2023)."""

    mask_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the residues to predict."""
    first_mask_share: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of the residues to predict in the first step. It moves linearly to mask_share; validation always uses
    mask_share. none: mask_share throughout."""
    mask_share_steps: PositiveInt = 10_000
    """Steps over which first_mask_share moves to mask_share."""
    mask_token_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of the residues to predict that are replaced by <mask>."""
    random_token_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the residues to predict that are replaced by a random residue; the rest stay unchanged."""

    @model_validator(mode="after")
    def _shares_fit(self) -> "MaskedLMSection":
        # Tolerance for rounding: decimal shares that add up to 1 may exceed it in binary.
        if self.mask_token_share + self.random_token_share > 1 + 1e-9:
            raise ValueError("mask_token_share + random_token_share must not exceed 1")
        return self

    def at(self, step: int | None) -> "MaskedLMSection":
        """Return the shares of a training step (from 0); None for validation."""
        # Validation always masks like the end of training, so that its losses are comparable.
        if self.first_mask_share is None or step is None or step >= self.mask_share_steps:
            return self
        progress = step / self.mask_share_steps
        share = self.first_mask_share + (self.mask_share - self.first_mask_share) * progress
        return self.model_copy(update={"mask_share": share})
