"""Settings of the autoencoder."""

from pydantic import Field

from esmeray.train_config.section import Channels, PositiveInt, Section


class AutoencoderSection(Section):
    """The ESM-2 autoencoder: compress the features of each residue to a latent and reconstruct them."""

    hidden_sizes: list[Channels] = Field(default=[768, 512, 256, 128], min_length=1)
    """Channels after each bias-free layer of the encoder; the last number is the size of the latent. The decoder
    mirrors them."""
    normalization_tokens: PositiveInt = 65536
    """Number of tokens used to measure mean and scale of each feature channel before the first step."""
