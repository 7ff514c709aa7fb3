"""Mean of the autoencoder's latents over the residues of a protein."""

from esmeray.inference.models.kinds import OutputKind
from esmeray.inference.models.outputs.latents import latents
from esmeray.model.heads.pooling import mean_over_residues

KIND = OutputKind(
    "mean of the autoencoder's latents over the residues; special tokens left out",
    rows=lambda model, latents_TZ, inputs: mean_over_residues(latents_TZ, inputs.batch, *model.around),
    reads="last",
    features=latents,
    head="autoencoder",
    channels=lambda model: model.heads["autoencoder"].latent_size,
)
