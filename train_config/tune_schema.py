"""Settings of a search for the fastest configuration: what is varied, how each trial is measured, when to stop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from train_config.section import FolderName, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share, Tokens

Precision = Literal["bf16", "fp16", "none"]
_PRECISIONS: list[Precision] = ["bf16", "none"]


class SpaceSection(Section):
    """Values that are tried. One value keeps a setting fixed; None keeps that of the experiment."""

    tokens: list[Tokens] | None = Field(
        None,
        description=(
            "Token budgets of a packed batch. Default: powers of two from the smallest that holds data.max_length up "
            "to the global batch."
        ),
    )
    batch_size: list[PositiveInt] | None = Field(None, description="Most sequences in a packed batch.")
    num_workers: list[NonNegativeInt] | None = Field([0, 1, 2], description="Loader processes of each worker.")
    prefetch: list[PositiveInt] | None = Field(None, description="Batches that each loader process prepares ahead.")
    amp_dtype: list[Precision] | None = Field(_PRECISIONS, description="Precisions.")
    gradient_checkpointing: list[bool] | None = Field(
        [False, True], description="Whether activations are recomputed in the backward pass."
    )
    compile: list[bool] | None = Field(None, description="Whether the model is compiled.")
    stage: list[Annotated[int, Field(ge=0, le=3)]] | None = Field(None, description="ZeRO stages.")
    workers: list[PositiveInt] | None = Field(None, description="Training workers, one a device.")

    @field_validator("*")
    @classmethod
    def _different_values(cls, values: list[Any] | None) -> list[Any] | None:
        if values is not None and not values:
            raise ValueError("has no value: name at least one, or leave it out to keep that of the experiment")
        if values is not None and len(set(values)) < len(values):
            raise ValueError(f"names a value twice: {', '.join(map(str, values))}")
        return values


class MeasurementSection(Section):
    """How a trial is measured: steps that are not counted, then windows until two agree."""

    warmup_steps: PositiveInt = Field(2, description="Steps before anything is counted.")
    window_s: PositiveFloat = Field(2.0, description="Seconds of a window, at the least; it ends with a step.")
    agreement: Share = Field(0.03, description="Two windows in a row that differ by less end the trial.")
    max_windows: PositiveInt = Field(6, description="Windows after which a trial ends all the same.")
    timeout_s: PositiveFloat = Field(300.0, description="Seconds after which a trial counts as hung.")


class SearchSection(Section):
    """How configurations are chosen."""

    algorithm: Literal["tpe", "random", "grid"] = Field(
        "tpe",
        description=(
            "tpe: the largest budget, then what differs from the fastest in one setting, then Optuna's TPE (Bergstra "
            "et al. 2011); random: after the largest budget, by chance; grid: every configuration, each in full."
        ),
    )
    max_trials: PositiveInt | None = Field(
        None, description="Trials to measure. Default: a fifth of the space, at least 12; all of it for grid."
    )
    time_budget_s: PositiveFloat | None = Field(
        None, description="Seconds of measuring after which no trial is started."
    )
    seed: NonNegativeInt = Field(0, description="Seed of the choice.")
    repeats: NonNegativeInt = Field(
        3,
        description=(
            "Trials, at the most, that measure the fastest again at the end, until its speed is the mean of two. Not "
            "counted in max_trials; 0: none."
        ),
    )
    prune_margin: Share = Field(
        0.15,
        description=(
            "A trial stops early when its first window is slower than the best by more than this share, or its first n "
            "windows by more than an nth of it."
        ),
    )


class TuneConfig(Section):
    """A search for the most real tokens per second."""

    name: FolderName = Field(
        "tune_throughput",
        description="Folder of the search, in the storage path. The same name goes on with the search.",
    )
    memory_margin: Share = Field(
        0.08, description="Share of the device's memory that the fastest configuration has to leave free."
    )
    keep_global_tokens: bool = Field(
        True,
        description=(
            "Keep batch.global_tokens, so that speed changes and the result does not; budgets must then divide it. "
            "false: one batch of each worker a step."
        ),
    )
    space: SpaceSection = SpaceSection()
    measurement: MeasurementSection = MeasurementSection()
    search: SearchSection = SearchSection()
