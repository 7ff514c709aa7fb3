"""Settings of a model profile."""

from typing import Literal

from pydantic import Field

from esmeray.train_config.section import ComputeSection, PositiveInt


class ModelProfileSection(ComputeSection):
    """Batches and precision of a model profile. Profiles of experiments have their own section."""

    output: str | None = None
    """Folder to create. Default: profile-MODEL in the working folder."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    batch_sizes: list[PositiveInt] = Field(default=[1, 4, 8, 16, 32, 64])
    """Batch sizes, in texts, to measure latency and memory for. none: skip this step."""
