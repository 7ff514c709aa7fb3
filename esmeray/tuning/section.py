"""Settings of a search for the fastest configuration: what is varied, how each trial is measured, when to stop."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from esmeray.train_config.section import (
    FolderName,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
    Section,
    Share,
    Tokens,
)

_PRECISIONS: list[Precision] = ["bf16", "fp32"]


class SpaceSection(Section):
    """Values that are tried. One value keeps a setting fixed; None keeps that of the experiment."""

    tokens: list[Tokens] | None = None
    """Token budgets of a packed batch. Default: powers of two from the smallest that holds data.max_length up to the
    global batch, or with keep_global_tokens false up to a worker's share of the data; four in each doubling where
    nothing else is searched."""
    batch_size: list[PositiveInt] | None = None
    """Most sequences in a packed batch."""
    num_workers: list[NonNegativeInt] | None = Field(default=[0, 1, 2])
    """Loader processes of each worker."""
    prefetch: list[PositiveInt] | None = None
    """Batches that each loader process prepares ahead."""
    precision: list[Precision] | None = Field(default=_PRECISIONS)
    """Precisions that are measured."""
    gradient_checkpointing: list[bool] | None = Field(default=[False, True])
    """Recompute activations in the backward pass, or not."""
    compile: list[bool] | None = None
    """Compile the model, or not."""
    stage: list[Annotated[int, Field(ge=0, le=3)]] | None = None
    """ZeRO stages that are measured."""
    workers: list[PositiveInt] | None = None
    """Training workers, one a device."""

    @field_validator("*")
    @classmethod
    def _different_values(cls, values: list[Any] | None) -> list[Any] | None:
        if values is not None and not values:
            raise ValueError("has no value: name at least one, or leave it out to keep that of the experiment")
        if values is not None and len(set(values)) < len(values):
            raise ValueError(f"names a value twice: {', '.join(map(str, values))}")
        return values


class MeasurementSection(Section):
    """Steps of a trial: those that are not counted, then windows until two agree."""

    warmup_steps: PositiveInt = 2
    """Steps before anything is counted."""
    window_s: PositiveFloat = 2.0
    """Seconds of a window, at the least; it ends with a step."""
    agreement: Share = 0.03
    """Two windows in a row that differ by less end the trial."""
    max_windows: PositiveInt = 6
    """Windows after which a trial ends all the same."""
    timeout_s: PositiveFloat = 300.0
    """Seconds after which a trial counts as hung."""


class SearchSection(Section):
    """Choice of the configurations."""

    algorithm: Literal["tpe", "random", "grid"] = "tpe"
    """The largest budget that fits first, then: tpe: Optuna's TPE (Bergstra et al. 2011); random: by chance; grid:
    every configuration, each in full."""
    max_trials: PositiveInt | None = None
    """Trials to measure. Default: a fifth of the space, at least 12; all of it for grid."""
    time_budget_s: PositiveFloat | None = None
    """Seconds of measuring, of all trials together, after which none is started."""
    seed: NonNegativeInt = 0
    """Seed from which configurations are chosen."""
    prune_margin: Share = 0.15
    """A trial stops early when its first window is slower than the best by more than this share, or its first n windows
    by more than an nth of it."""


class TuneConfig(Section):
    """A search for the most real tokens per second."""

    name: FolderName = "tune_throughput"
    """Folder of the search, in the storage path. The same name resumes the search."""
    memory_margin: Share = 0.08
    """Share of the device's memory that the fastest configuration has to leave free."""
    keep_global_tokens: bool = True
    """Keep batch.global_tokens, so that speed changes and the result does not; budgets must then divide it. false: one
    batch of each worker a step."""
    inference: bool = False
    """Measure forward passes alone, without gradients, instead of training."""
    space: SpaceSection = SpaceSection()
    measurement: MeasurementSection = MeasurementSection()
    search: SearchSection = SearchSection()
