"""What the stages work on: one store, one model, one device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dataset.batches.cropping import cropped_lengths
from dataset.batches.plan import EpochPlan, plan_epoch
from dataset.store.reader import Store
from tools._benchmark.measuring import Clock, Show
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, BackboneSection, BatchSection, DataSection

SEED = 0
MOST_RECORDS = 200_000
"""Records that loading works on: an epoch of more would be planned for longer than it is loaded from."""


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        store: the user's.
        backbone: the model.
        max_length: residues; longer sequences are cropped, as by data.max_length.
        device: that the model runs on.
        clock: of the whole run.
        show: shows what is being done.
    """

    store: Store
    backbone: BackboneSection
    max_length: int
    device: torch.device
    clock: Clock
    show: Show = field(default=lambda _: None)

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

    def data_section(self, num_workers: int) -> DataSection:
        """How batches are loaded."""
        return DataSection(max_length=self.max_length, num_workers=num_workers)
