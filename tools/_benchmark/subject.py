"""What is measured, and how: one store, one model, one device, and the clock of the whole run.

In: variants of one piece of work. Out: their samples, by :mod:`common.timing`: each is done once before it counts;
then all take turns until the stage's time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from common import timing
from dataset.batches.cropping import cropped_lengths
from dataset.batches.plan import EpochPlan, plan_epoch
from dataset.store.reader import Store
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, BackboneSection, BatchSection

SEED = 0
LEAST_ROUNDS = 3
"""Fewer than these show no spread, so nothing is advised from them."""
MOST_ROUNDS = 25
MOST_RECORDS = 200_000
"""Records that loading works on: an epoch of more would be planned for longer than it is loaded from."""

Settings: TypeAlias = dict[str, int | str]


class Done(NamedTuple):
    """A finished piece of work.

    Attributes:
        amounts: work done, by the unit of its rate: ``{"records/s": 1000}`` is divided by the seconds that it took.
        values: what the piece measured itself, by unit.
    """

    amounts: Mapping[str, float]
    values: Mapping[str, float] = {}


class Variant(NamedTuple):
    """One way to do the work of a stage: its name in the table, a piece of its work, and the settings that vary."""

    name: str
    work: Callable[[], Done]
    settings: Settings


@dataclass(frozen=True)
class Row:
    """Samples of a variant by unit, one for each round."""

    name: str
    settings: Settings
    samples: dict[str, list[float]]

    def median(self, unit: str) -> float:
        """Median of the samples."""
        return median(self.samples[unit])

    @property
    def rounds(self) -> int:
        """Number of samples."""
        return max(map(len, self.samples.values()))


@dataclass(frozen=True)
class StageResult:
    """Rows of a stage, with notes such as on variants that were left out."""

    name: str
    title: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


class Subject:
    """The store and the model that are measured.

    Args:
        store: the user's.
        backbone: the model.
        max_length: residues; longer sequences are cropped, as by data.max_length.
        device: that the model runs on.
        seconds: for the whole run, from now on.
        show: shows what is being done.
    """

    def __init__(
        self,
        store: Store,
        backbone: BackboneSection,
        max_length: int,
        device: torch.device,
        seconds: float,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.store, self.backbone, self.max_length, self.device, self.show = store, backbone, max_length, device, show
        self._seconds, self._start_s = seconds, time.perf_counter()

    @property
    def passed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until this share of the time has passed; 0 where it has."""
        return max(0.0, share * self._seconds - self.passed_s)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence after cropping."""
        return min(int(self.store.lengths.max()), self.max_length) + SPECIAL_TOKENS_PER_SEQUENCE

    def tokens_of(self, records_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) tokens of each record after cropping, special tokens included."""
        return cropped_lengths(self.store.lengths[records_N], self.max_length) + SPECIAL_TOKENS_PER_SEQUENCE

    def some_records(self, most: int = MOST_RECORDS) -> NDArray[np.int64]:
        """(N,) records, at random but the same each time; all where there are no more than ``most``."""
        number = len(self.store)
        if number <= most:
            return np.arange(number, dtype=np.int64)
        return np.sort(np.random.default_rng(SEED).choice(number, most, replace=False)).astype(np.int64)

    def plan(self, records_N: NDArray[np.int64], budget: int) -> EpochPlan:
        """Batches of these records."""
        return plan_epoch(self.tokens_of(records_N), budget, BatchSection().packing_window, SEED, 0, records=records_N)

    def budgets(self, smallest: int, largest: int) -> list[int]:
        """Powers of two that hold the longest sequence; at least one."""
        first = max(smallest, 1 << (self.longest_tokens - 1).bit_length())
        return [first << step for step in range(24) if first << step <= max(largest, first)]

    def measure(
        self, variants: Sequence[Variant], until_share: float, *, warm_up: bool = True, most_rounds: int = MOST_ROUNDS
    ) -> tuple[list[Row], list[str]]:
        """Measure until this share of the time has passed, at least :data:`LEAST_ROUNDS` while any of it is left.

        Returns:
            Rows of the variants that fit into memory, and notes.
        """
        samplers = {variant.name: _sampler(variant) for variant in variants}
        failed: dict[str, Exception] = {}
        if warm_up:
            failed = self._turns(samplers, 1).failed
        samplers = {name: sampler for name, sampler in samplers.items() if name not in failed}
        measured = self._turns(
            samplers,
            most_rounds,
            lambda done: not self.left_s() or (done >= LEAST_ROUNDS and not self.left_s(until_share)),
        )
        rows = [
            Row(variant.name, variant.settings, _by_unit(samples))
            for variant in variants
            if (samples := measured.samples.get(variant.name)) and variant.name not in measured.failed
        ]
        notes = [f"{name}: out of the device's memory" for name in [*failed, *measured.failed]]
        if rows and rows[0].rounds < min(LEAST_ROUNDS, most_rounds):
            notes.append(f"time was up after {rows[0].rounds} rounds: --seconds gives more")
        return rows, notes

    def _turns(
        self,
        samplers: Mapping[str, Callable[[], dict[str, float]]],
        rounds: int,
        enough: Callable[[int], bool] = lambda _: False,
    ) -> timing.Measured[dict[str, float]]:
        lack = (torch.OutOfMemoryError,)
        return timing.measure(samplers, rounds, enough=enough, drop_out_on=lack, show=self.show)


def _sampler(variant: Variant) -> Callable[[], dict[str, float]]:
    def sample() -> dict[str, float]:
        done, elapsed_s = timing.timed(variant.work)
        return {**{unit: amount / elapsed_s for unit, amount in done.amounts.items()}, **done.values}

    return sample


def _by_unit(samples: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {unit: [sample[unit] for sample in samples] for unit in samples[0]}
