"""Settings of sequence diffusion."""

from typing import Annotated, Literal

from pydantic import Field

from esmeray.model.section import StructureEncoderSection
from esmeray.train_config.section import Channels, NonNegativeFloat, Section, Share


class DiffusionSection(Section):
    """Masked diffusion of sequences (Sahoo et al. 2024, MDLM; Wang et al. 2024, DPLM): at time t in (0, 1] each residue
    is hidden with a probability that the schedule gives, and all are predicted at once."""

    schedule: Literal["linear", "cosine"] = "linear"
    """Share of hidden residues at time t. linear: t; cosine: 1 - cos(t pi / 2)."""
    weighting: Literal["none", "linear", "elbo"] = "linear"
    """Weight of a sequence of which a share m is hidden. none: 1; linear: 1 - m, DPLM's; elbo: 1 / m, the likelihood
    bound of MDLM. Each divided by its mean."""
    drop_share: Share = 0.1
    """Share of sequences trained without their structure, and of those without their label, for guidance."""
    noise: NonNegativeFloat = 0.1
    """Standard deviation in Å of the noise on coordinates in training; ProteinMPNN takes 0.02 to 0.2."""
    min_confidence: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Residues of predicted structures with less confidence (pLDDT) count as without coordinates."""
    adapter_size: Channels = 256
    """Channels of the adapter's feed-forward (LM-Design, Zheng et al. 2023)."""
    encoder: StructureEncoderSection = StructureEncoderSection()
