"""Mean embeddings by transformers' EsmModel: as its documentation shows it, and tuned by hand.

The documented form: fp32, a tokenizer that pads, a loop over batches of 16 in the order of the file. The tuned form is
what a careful user without another library writes: sorted by length, bf16, and the fastest batch size on this machine.

Shape legend: N sequences, B sequences of a batch, L tokens with padding, D channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dnaio
import numpy as np
import torch
from torch import Tensor
from transformers import EsmModel, EsmTokenizer

from benchmarks.harness.inputs import random_network
from benchmarks.harness.stage import Device, Setting
from esmeray.common.processor import default_precision
from esmeray.common.timing import timed
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.dataset.tokens.model_folder import quiet_transformers

MAX_TOKENS = 1024
"""The model_max_length of facebook/esm2_*: 1022 residues between <cls> and <eos>."""
DOCUMENTED_BATCH = 16
SEARCHED_BATCHES: dict[Device, tuple[int, ...]] = {"cpu": (1, 2, 4, 8, 16), "cuda": (16, 32, 64, 128, 256)}

_DTYPES = {"fp16": torch.float16, "bf16 weights": torch.bfloat16}


def write_model(folder: Path, size: str, **changes: int) -> str:
    """Save random weights of EsmForMaskedLM with the tokenizer, as the hub has ESM-2; return the folder."""
    with quiet_transformers():
        random_network(size, **changes).save_pretrained(folder)
    EsmSequenceTokenizer().save(folder, model_max_length=MAX_TOKENS)
    return str(folder)


@dataclass(frozen=True)
class Tuning:
    """Settings of a user."""

    precision: str = "fp32"
    batch_size: int = DOCUMENTED_BATCH
    sort_by_length: bool = False


class TransformersEmbedder:
    """EsmModel with a padding tokenizer; call it with sequences."""

    def __init__(self, folder: str, device: str, tuning: Tuning) -> None:
        self.tuning = tuning
        self._device = device
        self._tokenizer = EsmTokenizer.from_pretrained(folder)
        dtype = _DTYPES.get(tuning.precision, torch.float32)
        with quiet_transformers():
            model: Any = EsmModel.from_pretrained(folder, add_pooling_layer=False, dtype=dtype)
        self._model = model.to(device).eval()

    def __call__(self, sequences: Sequence[str]) -> Tensor:
        """Return (N, D) float32 on the CPU."""
        order = list(range(len(sequences)))
        if self.tuning.sort_by_length:
            # The longest first, so that a batch that needs too much memory fails at once.
            order.sort(key=lambda index: len(sequences[index]), reverse=True)
        ordered = [sequences[index] for index in order]
        starts = range(0, len(ordered), self.tuning.batch_size)
        means = [self._means(ordered[start : start + self.tuning.batch_size]) for start in starts]
        # One copy to the host at the end: a copy per batch would be a synchronisation per batch.
        means_ND = torch.cat(means).cpu()
        in_order_ND = torch.empty_like(means_ND)
        in_order_ND[order] = means_ND
        return in_order_ND

    @torch.inference_mode()
    def _means(self, sequences: list[str]) -> Tensor:
        """Return (B, D) float32 on the device."""
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


def embed_file(model: str, device: Device, tuned: dict[str, Any], fasta: str, target: str) -> None:
    """Do the work of a whole script: a FASTA file to an npz file of ids and vectors."""
    with dnaio.open(fasta) as reader:
        sequences = {record.id: record.sequence for record in reader}
    vectors = TransformersEmbedder(model, device, Tuning(**tuned))(list(sequences.values()))
    np.savez(target, ids=np.array(list(sequences)), vectors=vectors.numpy())


def search_tuning(folder: str, setting: Setting, sequences: Sequence[str]) -> Tuning:
    """Return the fastest precision and batch size on these sequences; fp32 if the processor lacks bf16 instructions."""
    half = default_precision(setting.device == "cuda") == "bf16"
    seconds: dict[Tuning, float] = {}
    for batch_size in SEARCHED_BATCHES[setting.device][: 1 if setting.quick else None]:
        for precision in ("bf16 weights", "bf16 autocast") if half else ("fp32",):
            tuning = Tuning(precision, batch_size, sort_by_length=True)
            embedder = TransformersEmbedder(folder, setting.device, tuning)
            # The better of two: torch sets up new shapes in the first.
            seconds[tuning] = min(timed(partial(embedder, sequences))[1] for _ in range(2))
    return min(seconds, key=seconds.__getitem__)
