"""Training on structures as it is often written: PyTorch's DataLoader without processes, two proteins a batch, each
structure predicted when its batch is made, fp32, everything padded to one length; and what both ways are trained by."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader
from transformers import EsmConfig, EsmForProteinFolding
from transformers.models.esm.configuration_esm import get_default_vocab_list

from dataset.packed_batch import CHAINS, COORDINATES, IGNORED_TARGET, LABELS, NO_LABEL, TARGETS, PackedBatch
from dataset.tokens.esm import EOS, MASK, PAD, packed_from_tokens, sequence_lengths, tokenize_pieces
from inference.folding.predictors import Predictor
from model.tasks.diffusion import SequenceDiffusion
from train_config.diffusion_schema import DiffusionSection
from train_config.schema import BackboneSection, ModelSection

BATCH = 2


class PaddedBatches:
    """Batches of hidden residues and predicted structures, padded to ``length`` residues."""

    def __init__(self, sequences: Sequence[str], predictor: Predictor, length: int) -> None:
        self._predictor, self._length = predictor, length
        self._loader: Any = DataLoader(list(sequences), batch_size=BATCH, collate_fn=self._collate)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[PackedBatch, int]]:
        """Each batch and its residues."""
        return iter(self._loader)

    def _collate(self, sequences: list[str]) -> tuple[PackedBatch, int]:
        longest = self._length + 2
        tokens = torch.full((len(sequences), longest), PAD)
        targets = torch.full((len(sequences), longest), IGNORED_TARGET)
        coordinates = torch.full((len(sequences), longest, 4, 3), torch.nan)
        for row, (sequence, found) in enumerate(zip(sequences, self._predictor.predict(sequences), strict=True)):
            inside = slice(1, len(sequence) + 1)
            tokens[row, : len(sequence) + 2] = torch.from_numpy(tokenize_pieces([sequence.encode()]).astype("int64"))
            assert tokens[row, len(sequence) + 1] == EOS
            hidden = torch.zeros(longest, dtype=torch.bool)
            hidden[inside] = torch.rand(len(sequence)) < torch.rand(())
            hidden[1] = True
            targets[row, hidden] = tokens[row, hidden]
            tokens[row, hidden] = MASK
            coordinates[row, inside] = torch.from_numpy(found.coordinates)
        batch = packed_from_tokens(tokens.flatten().numpy(), sequence_lengths([range(longest)] * len(sequences)))
        batch = batch.adding(
            {
                TARGETS: targets.flatten(),
                COORDINATES: coordinates.flatten(0, 1),
                CHAINS: torch.zeros(tokens.numel(), dtype=torch.int64),
            },
            {LABELS: torch.full((len(sequences),), NO_LABEL)},
        )
        return batch, sum(map(len, sequences))


class Trainer:
    """A model and AdamW."""

    section = DiffusionSection()

    def __init__(self, backbone: BackboneSection, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        section = ModelSection(task="diffusion", backbone=backbone, diffusion=self.section)
        self._model = SequenceDiffusion.build(section, 0).to(device, dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._device = device

    def train(self, batches: Iterator[tuple[Any, int]], facts: dict[str, Any], name: str) -> float:
        """A pass over the batches; its residues. Notes waiting and busy shares."""
        residues, waited_s, start_s = 0, 0.0, time.perf_counter()
        psutil.cpu_percent()
        while True:
            asked_s = time.perf_counter()
            made = next(batches, None)
            waited_s += time.perf_counter() - asked_s
            if made is None:
                break
            batch, number = made
            output = self._model(batch.to(self._device))
            (output.loss_sum / output.num_targets.clamp(min=1)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            residues += number
        facts[f"share of a step that waits for data, {name}"] = round(waited_s / (time.perf_counter() - start_s), 4)
        facts[f"busy share of the cores, {name}"] = round(psutil.cpu_percent() / 100, 2)
        return residues


def save_predictor(folder: Path) -> Path:
    """ESMFold with 6 layers of 320 channels and 4 folding blocks, in place of 36 of 2,560 and 48, recycled once."""
    torch.manual_seed(0)
    trunk = {"num_blocks": 4, "sequence_state_dim": 256, "pairwise_state_dim": 64, "max_recycles": 1}
    sizes: dict[str, Any] = {
        **{"vocab_size": 33, "hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 20},
        **{"intermediate_size": 1280, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 32},
        "esmfold_config": {"trunk": trunk, "fp16_esm": False},
        "vocab_list": list(get_default_vocab_list()),
    }
    config = EsmConfig(**sizes, is_folding_model=True)
    EsmForProteinFolding(config).save_pretrained(folder)
    return folder
