"""Settings of a profile of a model."""

from typing import Literal

from pydantic import Field

from esmeray.train_config.section import ComputeSection, NonNegativeInt, PositiveInt


class ModelProfileSection(ComputeSection):
    """Texts, batches and precision of a profile of a model. An experiment has its own."""

    output: str | None = None
    """Folder to make. Default: profile-MODEL, here."""
    batches: PositiveInt = 10
    """Batches to trace, about; fewer where the input has no more."""
    steps: list[Literal["stages", "batch_sizes", "accuracy"]] = Field(
        default=["stages", "batch_sizes", "accuracy"], min_length=1
    )
    """Parts of the profile. accuracy: of a classifier, whose input then needs labels."""
    outputs: list[str] = Field(default=[])
    """Outputs to compute. Default: mean; classes of a classifier."""
    layers: list[int] = Field(default=[-1], min_length=1)
    """Layers that outputs are taken from, as embed.layers."""
    long: Literal["error", "crop", "window"] = "crop"
    """Sequences of more than max_length residues, as embed.long; of stages alone, batch sizes are of cropped ones."""
    max_length: PositiveInt | None = None
    """Residues of the longest sequence, as embed.max_length. A classifier has its own limit."""
    device: Literal["cpu", "cuda"] | None = None
    """Device that computes, cpu or cuda. Default: CUDA where there is one."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M), whose weights are random, to try things out."""
    batch_sizes: list[PositiveInt] = Field(default=[1, 4, 8, 16, 32, 64])
    """Texts of a batch whose latency and memory are measured; none to leave this out."""
    token_budgets: list[PositiveInt] = Field(default=[])
    """Tokens of a batch, in place of batch_sizes."""
    warmup_runs: NonNegativeInt = 3
    """Batches of each size that don't count."""
    runs: PositiveInt = 20
    """Batches of each size that are measured."""
