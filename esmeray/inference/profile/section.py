"""Settings of a model profile."""

from typing import Literal

from pydantic import Field

from esmeray.train_config.section import ComputeSection, PositiveInt


class ModelProfileSection(ComputeSection):
    """Texts, batches and precision of a model profile. Profiles of experiments have their own section."""

    output: str | None = None
    """Folder to create. Default: profile-MODEL in the working folder."""
    steps: list[Literal["stages", "batch_sizes", "accuracy"]] = Field(
        default=["stages", "batch_sizes", "accuracy"], min_length=1
    )
    """Parts of the profile. accuracy is for classifiers, whose input then needs labels."""
    layers: list[int] = Field(default=[-1], min_length=1)
    """Layers of the mean, as in embed.layers. A classifier computes its classes."""
    long: Literal["error", "crop", "window"] = "crop"
    """Handling of sequences longer than max_length residues, as in embed.long. Applies to stages; batch sizes are
    measured with cropped sequences.
    """
    max_length: PositiveInt | None = None
    """Maximum residues of a sequence, as in embed.max_length. A classifier has its own limit."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    batch_sizes: list[PositiveInt] = Field(default=[1, 4, 8, 16, 32, 64])
    """Batch sizes, in texts, to measure latency and memory for. An empty list skips this step."""
