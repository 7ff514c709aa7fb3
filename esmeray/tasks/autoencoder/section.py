"""Settings of the autoencoder."""

from pydantic import Field, model_validator

from esmeray.train_config.section import Channels, NonNegativeFloat, PositiveInt, Section


class AutoencoderSection(Section):
    """The ESM-2 autoencoder: compress the features of each residue to a latent and reconstruct them."""

    hidden_sizes: list[Channels] = Field(default=[768, 512, 256, 128], min_length=1)
    """Channels after each bias-free layer of the encoder; the last number is the size of the latent. The decoder
    mirrors them."""
    feature_loss_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared error of the normalized features."""
    cosine_loss_weight: NonNegativeFloat = 0.0
    """Weight of 1 - cosine between normalized features and their reconstruction."""
    residue_loss_weight: NonNegativeFloat = 1.0
    """Weight of the cross entropy of the residues decoded from the latent."""
    normalization_tokens: PositiveInt = 65536
    """Number of tokens used to measure mean and scale of each feature channel before the first step."""

    @model_validator(mode="after")
    def _some_loss(self) -> "AutoencoderSection":
        # With all weights 0 nothing would be learnt, and the run would still look successful.
        if self.feature_loss_weight + self.cosine_loss_weight + self.residue_loss_weight == 0:
            raise ValueError("at least one of the loss weights must be above 0")
        return self
