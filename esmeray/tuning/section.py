"""Settings of a search for the fastest configuration: varied settings, measurement of a trial, and limits."""

from typing import Any

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
    """Values to try. A single value fixes a setting; none keeps the experiment's value."""

    tokens: list[Tokens] | None = None
    """Token budgets of a packed batch. Default: powers of two, from the smallest that holds data.max_length up to the
    global batch, or with keep_global_tokens false up to a worker's share of the data. If nothing else is searched, four
    budgets per doubling."""
    batch_size: list[PositiveInt] | None = None
    """Maximum number of sequences in a packed batch."""
    num_workers: list[NonNegativeInt] | None = Field(default=[0, 1, 2])
    """Loader processes per worker."""
    precision: list[Precision] | None = Field(default=_PRECISIONS)
    """Precisions of the forward and backward pass."""
    workers: list[PositiveInt] | None = None
    """Numbers of training workers, with one device each."""

    @field_validator("*")
    @classmethod
    def _different_values(cls, values: list[Any] | None) -> list[Any] | None:
        if values is not None and not values:
            raise ValueError("is empty: give at least one value, or remove it to keep the experiment's")
        if values is not None and len(set(values)) < len(values):
            raise ValueError(f"lists a value twice: {', '.join(map(str, values))}")
        return values


class MeasurementSection(Section):
    """Times of a trial."""

    window_s: PositiveFloat = 4.0
    """Minimum length of the window in seconds; it ends with a step."""
    timeout_s: PositiveFloat = 300.0
    """Seconds after which a trial counts as hung."""


class SearchSection(Section):
    """Limits of the search."""

    max_trials: PositiveInt | None = None
    """Number of trials to measure. Default: a third of the space, at least 12."""
    time_budget_s: PositiveFloat | None = None
    """Seconds of measuring, over all trials, after which no trial starts. none: no limit."""


class TuneConfig(Section):
    """Search for the configuration with the most real tokens per second."""

    name: FolderName = "tune_throughput"
    """Folder of the search, in the storage path. The same name resumes the search."""
    memory_margin: Share = 0.08
    """Share of the device's memory that the fastest configuration must leave free."""
    keep_global_tokens: bool = True
    """Keep batch.global_tokens, so that the result of training is unchanged; budgets must then divide it. false: a step
    is one batch per worker."""
    space: SpaceSection = SpaceSection()
    measurement: MeasurementSection = MeasurementSection()
    search: SearchSection = SearchSection()
