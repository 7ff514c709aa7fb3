"""Autoencoder latents per residue."""

from collections.abc import Sequence

from torch import Tensor

from esmeray.inference.models.kinds import OutputKind
from esmeray.inference.models.model import Model


def latents(model: Model, hidden_TD: Tensor) -> Tensor:
    """(T, Z) fp32."""
    return model.heads["autoencoder"].latents(hidden_TD)


def decoded(model: Model, latents: Sequence[Tensor]) -> Sequence[Tensor]:
    """(L, K) logits of each protein's residues, decoded from its (L, Z) latents."""
    return model.heads["autoencoder"].decode(latents)[1]


KIND = OutputKind(
    "latents of the autoencoder for each residue; special tokens left out",
    rows=lambda model, latents_TZ, inputs: latents_TZ[inputs.residues],
    per="residue",
    reads="last",
    features=latents,
    head="autoencoder",
    channels=lambda model: model.heads["autoencoder"].latent_size,
)
