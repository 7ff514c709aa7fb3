"""Small networks and batches for the tests of models."""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esmeray.dataset.packed_batch import TARGETS, PackedBatch
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.dataset.tokens.esm import MASK, pack_sequences
from esmeray.model.backbones.base import Checkpointing
from esmeray.model.section import BackboneSection
from esmeray.model.task_model import TaskModel
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from esmeray.tasks.autoencoder.section import AutoencoderSection
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.section import ModelSection

LETTERS = "LAGVSERTIDPKQNFYMHWC"
TINY = BackboneSection(source="esm2_t6_8M", layers=2, hidden_size=32, heads=4)
TINY_AUTOENCODER = AutoencoderSection(hidden_sizes=[24, 8])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise in the block on each operation that waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tiny_section(
    task: str = "autoencoder", *, frozen: bool = False, checkpointing: Checkpointing = False
) -> ModelSection:
    backbone = TINY.model_copy(update={"frozen": frozen, "gradient_checkpointing": checkpointing})
    return ModelSection(task=task, backbone=backbone, autoencoder=TINY_AUTOENCODER)


def build_model(section: ModelSection, seed: int) -> TaskModel:
    """Build the residue model of a section."""
    kinds: dict[str, type[MaskedLM] | type[ESM2Autoencoder]] = {"masked_lm": MaskedLM, "autoencoder": ESM2Autoencoder}
    return kinds[section.task].build(section, seed)


def random_sequences(lengths: Sequence[int], seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=length)) for length in lengths]


def residue_batch(sequences: Sequence[str]) -> PackedBatch:
    """A batch for the autoencoder: the residues are their own targets."""
    batch = pack_sequences(sequences)
    return batch.adding({TARGETS: torch.where(batch.tokens >= 4, batch.tokens, IGNORED_TARGET)})


def masked_batch(sequences: Sequence[str], shares: Sequence[float], seed: int = 0) -> PackedBatch:
    """A batch in which a share of each sequence's residues is masked; the masked residues are the targets."""
    batch = residue_batch(sequences)
    share_T = torch.tensor(shares)[batch.segment_ids()]
    draws_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    hidden_T = (draws_T < share_T) & (batch.tokens >= 4)
    return dataclasses.replace(
        batch,
        tokens=torch.where(hidden_T, MASK, batch.tokens),
        by_token={TARGETS: torch.where(hidden_T, batch.tokens, IGNORED_TARGET)},
    )


Tensors: TypeAlias = Tensor | Sequence[Tensor]


def assert_near(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    """Check that tensors differ by at most ``tolerance`` times the largest expected magnitude.

    Processors sum in different orders, so the error of a small value is as large as the error of the large ones.
    """
    every = [expected] if isinstance(expected, Tensor) else expected
    largest = max(float(tensor.detach().abs().max()) for tensor in every)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * largest)


def segments(values: Tensor, batch: PackedBatch) -> list[Tensor]:
    """Split (T, ...) values by sequence."""
    return list(values.split((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()))


def batch_of_lengths(lengths: Sequence[int]) -> PackedBatch:
    """A packed batch of sequences with these lengths in tokens, special tokens included; a length may be 0."""
    ends = torch.tensor(lengths).cumsum(0)
    return PackedBatch(
        tokens=torch.full((int(ends[-1]),), 5),
        cu_seqlens=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        max_seqlen=max(lengths),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        records=torch.arange(len(lengths)),
    )


WAITING = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.lift_fresh.default"}
"""Operators that are CPU-GPU sync points: reading a value, finding nonzeros, and copying Python numbers."""


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))
