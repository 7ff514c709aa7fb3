"""The subject of a benchmark: one store, one model, one device, and the clock of the whole run.

In: variants of the work of a stage. Out: their samples, by :mod:`common.timing`: all take turns, the first round is a
warm-up that does not count, and the last ends when the stage's time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
END_SHARES = {"reading": 0.1, "tokenizing": 0.15, "packing": 0.22, "inference": 0.58, "loading": 0.7, "pipeline": 1.0}
"""End of each stage, as a share of the time there is."""

Settings: TypeAlias = dict[str, int | str]


class Variant(NamedTuple):
    """One way to do the work of a stage: its name, the settings that vary, and a sample of it by unit."""

    name: str
    settings: Settings
    sample: Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """Samples of a variant by unit, one for each round."""

    name: str
    settings: Settings
    samples: dict[str, list[float]]

    def median(self, unit: str) -> float:
        return median(self.samples[unit])

    @property
    def rounds(self) -> int:
        return max(map(len, self.samples.values()))


@dataclass(frozen=True)
class StageResult:
    """Rows of a stage, with notes such as on variants that were left out."""

    name: str
    title: str
    rows: list[Row]
    notes: list[str]


class Subject:
    """The store and the model that are measured.

    ``max_length`` is in residues, as data.max_length; ``seconds`` are for the whole run, from now on.
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

    def pieces(self, records_N: NDArray[np.int64]) -> list[memoryview]:
        """Sequences cropped at their end, as views of the store's memory."""
        residues_N = self.tokens_of(records_N) - SPECIAL_TOKENS_PER_SEQUENCE
        return self.store.windows(records_N, np.zeros_like(residues_N), residues_N)

    def some_records(self, most: int = MOST_RECORDS) -> NDArray[np.int64]:
        """(N,) records, at random but the same each time; all where there are no more than ``most``."""
        number = len(self.store)
        return np.sort(np.random.default_rng(SEED).choice(number, min(most, number), replace=False))

    def plan(self, records_N: NDArray[np.int64], budget: int) -> EpochPlan:
        """Batches of these records."""
        return plan_epoch(self.tokens_of(records_N), budget, BatchSection().packing_window, SEED, 0, records=records_N)

    def budgets(self, smallest: int, largest: int) -> list[int]:
        """Powers of two that hold the longest sequence; at least one."""
        first = max(smallest, 1 << (self.longest_tokens - 1).bit_length())
        return [first << step for step in range(24) if first << step <= max(largest, first)]

    def measure(self, name: str, title: str, variants: Sequence[Variant], notes: Sequence[str] = ()) -> StageResult:
        """Measure a stage's variants until its time is up, at least :data:`LEAST_ROUNDS` while any of all is left."""

        def enough(done: int) -> bool:  # the warm-up among them
            end = done > LEAST_ROUNDS and not self.left_s(END_SHARES[name])
            return done > 1 and (end or not self.left_s())

        samplers = {variant.name: variant.sample for variant in variants}
        measured = timing.measure(
            samplers, MOST_ROUNDS + 1, enough=enough, drop_out_on=(torch.OutOfMemoryError,), show=self.show
        )
        rows = [
            Row(variant.name, variant.settings, _by_unit(measured.samples[variant.name][1:]))
            for variant in variants
            if variant.name not in measured.failed
        ]
        lines = [*notes, *(f"{variant}: out of the device's memory" for variant in measured.failed)]
        if rows and rows[0].rounds < LEAST_ROUNDS:
            lines.append(f"time was up after {rows[0].rounds} rounds: --seconds gives more")
        return StageResult(name, title, rows, lines)


def _by_unit(samples: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {unit: [sample[unit] for sample in samples] for unit in samples[0]}
