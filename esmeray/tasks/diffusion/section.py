"""Settings of sequence diffusion."""

from typing import Annotated, Literal

from pydantic import Field

from esmeray.model.section import StructureEncoderSection
from esmeray.train_config.section import Channels, NonNegativeFloat, Section, Share


class DiffusionSection(Section):
    """Masked diffusion of sequences (Sahoo et al. 2024, MDLM; Wang et al. 2024, DPLM). At time t in (0, 1] each residue
    is hidden with the probability of the schedule, and all hidden residues are predicted at once."""

    schedule: Literal["linear", "cosine"] = "linear"
    """Share of hidden residues at time t. linear: t; cosine: 1 - cos(t pi / 2)."""
    weighting: Literal["none", "linear", "elbo"] = "linear"
    """Loss weight of a sequence with a share m of hidden residues. none: 1; linear: 1 - m, as in DPLM; elbo: 1 / m, the
    likelihood bound of MDLM. The last two are divided by their mean."""
    drop_share: Share = 0.1
    """Share of sequences trained without their structure, and share trained without their label, for guidance."""
    noise: NonNegativeFloat = 0.1
    """Standard deviation of the noise on coordinates in training, in Å. ProteinMPNN uses 0.02 to 0.2."""
    min_confidence: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Minimum confidence (pLDDT) of residues in predicted structures; below it, their coordinates are left out."""
    adapter_size: Channels = 256
    """Channels of the adapter's feed-forward layer (LM-Design, Zheng et al. 2023)."""
    encoder: StructureEncoderSection = StructureEncoderSection()
