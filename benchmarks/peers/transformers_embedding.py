"""Mean embeddings by transformers' EsmModel: as its documentation shows it, and tuned by hand.

In: a folder with weights, and sequences. Out: (N, D) float32, the mean over residues, in the order given.
As documented: fp32, a tokenizer that pads, a loop over batches of 16 in the order of the file. Tuned: what a careful
user gets to without another library: sorted by length, half precision, the batch size that is fastest here.

Shape legend: N sequences, B of a batch, L their tokens with padding, D channels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import EsmModel

from benchmarks.harness.stage import Device
from benchmarks.peers.tokenizers import MAX_TOKENS, esm_tokenizer
from model.backbones.loading import quiet_transformers

DOCUMENTED_BATCH = 16
SEARCHED_BATCHES: dict[Device, tuple[int, ...]] = {"cpu": (1, 2, 4, 8, 16), "cuda": (16, 32, 64, 128, 256)}

Precision = Literal["fp32", "fp16", "bf16 weights", "bf16 autocast"]
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16 weights": torch.bfloat16,
    "bf16 autocast": torch.float32,
}


@dataclass(frozen=True)
class Tuning:
    """What a user can set."""

    precision: Precision = "fp32"
    batch_size: int = DOCUMENTED_BATCH
    sort_by_length: bool = False

    def __str__(self) -> str:
        order = "sorted by length" if self.sort_by_length else "in file order"
        return f"{self.precision}, batches of {self.batch_size} {order}"


class TransformersEmbedder:
    """EsmModel with a padding tokenizer; call it with sequences."""

    def __init__(self, folder: Path, device: str, tuning: Tuning) -> None:
        self.tuning = tuning
        self._device = device
        self._tokenizer = esm_tokenizer(folder / "tokenizer")
        with quiet_transformers():
            model: Any = EsmModel.from_pretrained(folder, add_pooling_layer=False, dtype=_DTYPES[tuning.precision])
        self._model = model.to(device).eval()

    def __call__(self, sequences: Sequence[str]) -> Tensor:
        """(N, D) float32 on the CPU."""
        order = list(range(len(sequences)))
        if self.tuning.sort_by_length:
            order.sort(key=lambda index: len(sequences[index]), reverse=True)
        means = [self._means([sequences[index] for index in batch]) for batch in self._batches(order)]
        means_ND = torch.cat(means).cpu()
        in_order_ND = torch.empty_like(means_ND)
        in_order_ND[order] = means_ND
        return in_order_ND

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(order), self.tuning.batch_size):
            yield order[start : start + self.tuning.batch_size]

    @torch.inference_mode()
    def _means(self, sequences: list[str]) -> Tensor:
        """(B, D) float32 on the device."""
        tokens = self._tokenizer(
            sequences, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self._device)
        with self._autocast():
            hidden_BLD = self._model(**tokens).last_hidden_state
        mask_BL = tokens["attention_mask"].clone()
        mask_BL[torch.arange(len(sequences)), mask_BL.sum(1) - 1] = 0  # <eos>
        mask_BL[:, 0] = 0  # <cls>
        mask_BL1 = mask_BL.unsqueeze(-1)
        return (hidden_BLD.float() * mask_BL1).sum(1) / mask_BL1.sum(1)

    def _autocast(self) -> AbstractContextManager:
        if self.tuning.precision == "bf16 autocast":
            return torch.autocast(self._device, dtype=torch.bfloat16)
        return nullcontext()


def documented(device: str) -> Tuning:
    """As the documentation shows it; on a GPU in fp16, as its page on GPU inference advises."""
    return Tuning("fp16" if device == "cuda" else "fp32")


def search_tuning(folder: Path, device: Device, sequences: Sequence[str], batch_sizes: Sequence[int]) -> Tuning:
    """The fastest precision and batch size on some of the sequences; each is tried twice, the better time counts."""
    best, best_s = Tuning(), float("inf")
    precisions: tuple[Precision, ...] = ("bf16 weights", "bf16 autocast")
    for precision, batch_size in itertools.product(precisions, batch_sizes):
        embedder = TransformersEmbedder(folder, device, Tuning(precision, batch_size, sort_by_length=True))
        taken_s = min(_seconds(embedder, sequences) for _ in range(2))
        if taken_s < best_s:
            best, best_s = embedder.tuning, taken_s
    return best


def _seconds(embedder: TransformersEmbedder, sequences: Sequence[str]) -> float:
    start_s = time.perf_counter()
    embedder(sequences)  # ends on the CPU, so it waits for the device
    return time.perf_counter() - start_s
