"""Settings of ``esmeray profile``: a section for each subcommand. Texts are those of ``data.source``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from train_config.section import NonNegativeInt, PositiveFloat, PositiveInt, Precision, Section, Tokens


class ModelProfileSection(Section):
    """Texts, batches and precision of a profile of a model. An experiment has its own."""

    output: str | None = None
    """Folder to make. Default: profile-MODEL, here."""
    batches: PositiveInt = 10
    """Batches to trace, about; fewer where the input has no more."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    outputs: list[str] = Field([])
    """Outputs to compute. Default: mean; classes of a classifier."""
    precision: Precision | None = None
    """Of the computation. Default: bf16; fp32 on a processor without instructions for bf16."""
    device: Literal["cpu", "cuda"] | None = None
    """Default: CUDA where there is one."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M), whose weights are random, to try things out."""
    batch_sizes: list[PositiveInt] = Field([1, 4, 8, 16, 32, 64])
    """Texts of a batch whose latency and memory are measured; none to leave this out."""
    token_budgets: list[PositiveInt] = Field([])
    """Tokens of a batch, in place of batch_sizes."""
    warmup_runs: NonNegativeInt = 3
    """Batches of each size that don't count."""
    runs: PositiveInt = 20
    """Batches of each size that are measured."""


class DeviceProfileSection(Section):
    """Models and length of a comparison of devices."""

    models: list[str] = Field([])
    """Folders, hub names, sizes or runs."""
    output: str = "profile-devices"
    """Folder to make."""
    proteins: PositiveInt = 200
    """Distinct sequences to embed."""
    rounds: PositiveInt = 3
    """Measurements of each device."""
    precision: Precision | None = None
    """Of both devices, where there is a GPU. Default: as embed."""
    random_weights: bool = False
    """Take sizes (esm2_t6_8M), whose weights are random, to try things out."""


class GpuProfileSection(Section):
    """Recording of this machine's GPUs."""

    log: str | None = None
    """CSV file to record to, as nvidia-smi writes it, appended to if it is there. Default: check only."""
    interval_s: Annotated[float, Field(ge=0.05)] = 1.0
    """Seconds between samples; GPUs measure no faster than every 0.05."""
    duration_s: PositiveFloat | None = None
    """Seconds after which to end. Default: at Ctrl-C."""
    gpus: list[NonNegativeInt] = Field([])
    """Numbers of the GPUs to record, as nvidia-smi shows them. Default: all."""


class LogProfileSection(Section):
    """Files made of a GPU log."""

    output: str | None = None
    """The picture, a PNG. Default: beside the log, with its name."""
    json_output: str | None = None
    """Also write the summaries to this file, as JSON."""


class ModelProfileSettings(Section):
    """A profile of a model."""

    profile: ModelProfileSection = ModelProfileSection()


class DeviceProfileSettings(Section):
    """A comparison of devices."""

    profile: DeviceProfileSection = DeviceProfileSection()


class GpuProfileSettings(Section):
    """A check or a recording of GPUs."""

    profile: GpuProfileSection = GpuProfileSection()


class LogProfileSettings(Section):
    """An analysis of a GPU log."""

    profile: LogProfileSection = LogProfileSection()
