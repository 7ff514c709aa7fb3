"""Mean embeddings by transformers' EsmModel: as its documentation shows it, and tuned by hand.

As documented: fp32, a tokenizer that pads, a loop over batches of 16 in the order of the file. Tuned: what a careful
user gets to without another library: sorted by length, half precision, the batch size that is fastest here.

Shape legend: N sequences, B of a batch, L their tokens with padding, D channels.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import EsmModel, EsmTokenizer

from benchmarks.harness.stage import Device, Setting
from esmeray.common.timing import timed
from esmeray.dataset.tokens.esm import VOCABULARY
from esmeray.dataset.tokens.model_folder import quiet_transformers

MAX_TOKENS = 1024
"""The model_max_length of facebook/esm2_*: 1022 residues between <cls> and <eos>."""
DOCUMENTED_BATCH = 16
SEARCHED_BATCHES: dict[Device, tuple[int, ...]] = {"cpu": (1, 2, 4, 8, 16), "cuda": (16, 32, 64, 128, 256)}

Precision = Literal["fp32", "fp16", "bf16 weights", "bf16 autocast"]
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16 weights": torch.bfloat16,
    "bf16 autocast": torch.float32,
}


def esm_tokenizer(folder: Path) -> EsmTokenizer:
    """EsmTokenizer as ``from_pretrained("facebook/esm2_t6_8M_UR50D")`` gives it, without a download."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return EsmTokenizer(str(vocabulary), model_max_length=MAX_TOKENS)


@dataclass(frozen=True)
class Tuning:
    """Settings of a user."""

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
            # The longest first: memory that runs out does so at once.
            order.sort(key=lambda index: len(sequences[index]), reverse=True)
        ordered = [sequences[index] for index in order]
        starts = range(0, len(ordered), self.tuning.batch_size)
        means = [self._means(ordered[start : start + self.tuning.batch_size]) for start in starts]
        # To the host at the end: a copy for each batch would make it wait for the device.
        means_ND = torch.cat(means).cpu()
        in_order_ND = torch.empty_like(means_ND)
        in_order_ND[order] = means_ND
        return in_order_ND

    @torch.inference_mode()
    def _means(self, sequences: list[str]) -> Tensor:
        """(B, D) float32 on the device."""
        tokens = self._tokenizer(
            sequences, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self._device)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self.tuning.precision == "bf16 autocast"):
            hidden_BLD = self._model(**tokens).last_hidden_state
        mask_BL = tokens["attention_mask"].clone()
        mask_BL[torch.arange(len(sequences)), mask_BL.sum(1) - 1] = 0  # <eos>
        mask_BL[:, 0] = 0  # <cls>
        mask_BL1 = mask_BL.unsqueeze(-1)
        return (hidden_BLD.float() * mask_BL1).sum(1) / mask_BL1.sum(1)


def documented(device: str) -> Tuning:
    """Embedding as the documentation shows it; on a GPU in fp16, as its page on GPU inference advises."""
    return Tuning("fp16" if device == "cuda" else "fp32")


def search_tuning(folder: Path, setting: Setting, sequences: Sequence[str]) -> Tuning:
    """The fastest precision and batch size on some of the sequences; each is tried twice, the better time counts."""
    batch_sizes = SEARCHED_BATCHES[setting.device][: 1 if setting.quick else None]
    precisions: tuple[Precision, ...] = ("bf16 weights", "bf16 autocast")

    def seconds(tuning: Tuning) -> float:
        embedder = TransformersEmbedder(folder, setting.device, tuning)
        # The better of two: the first has what torch sets up for shapes that it has not met.
        return min(timed(partial(embedder, sequences))[1] for _ in range(2))

    return min((Tuning(*pair, sort_by_length=True) for pair in itertools.product(precisions, batch_sizes)), key=seconds)
