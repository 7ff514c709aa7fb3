"""Sequence diffusion as it is trained here, and as it was written before, with the use and the power of the GPU."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import LONGEST, MICRO_BATCHES, Bench, Row
from benchmarks.peers.structure_loop import PaddedBatches, Trainer, save_predictor
from dataset.batches.steps import TrainingSteps
from dataset.structures.batches import StructureSource
from dataset.structures.conversion import ensure_structure_store
from dataset.structures.store import StructureStore
from inference.folding.predictors import EsmFold
from train_config.schema import BatchSection, DataSection

PROTEINS = 40
"""Of the sample, for the loop that predicts."""


def structures(bench: Bench) -> Iterator[Row]:
    """Residues a second of sequence diffusion: kept structures, packed, bf16; predicted in the loop, padded, fp32."""
    folder = Path(tempfile.gettempdir()) / "esmeray-gpu-structures"
    store = StructureStore(ensure_structure_store(DataSection.model_validate({"sample": {"records": 2000}}), folder))
    name, tokens = bench.arguments.sizes[0], bench.arguments.tokens // 2
    kept = Trainer(bench.size(name), bench.device, torch.bfloat16 if bench.device == "cuda" else torch.float32)
    source = StructureSource(store, kept.section, max_length=LONGEST - 2, seed=0, training=True)
    batch = BatchSection(tokens=tokens, global_tokens=MICRO_BATCHES * tokens)
    steps = TrainingSteps(source, np.arange(len(store)), batch=batch, seed=0)
    packed = [(part, part.num_tokens - 2 * part.num_sequences) for part in next(steps.epoch(0))]
    kept.train(iter(packed), {}, "")
    yield {"model": name, "way": "kept, packed", **_measured(kept, iter(packed * 5))}
    predictor = EsmFold(str(save_predictor(folder / "esmfold")), bench.device)
    texts = [store.store.text(record) for record in range(PROTEINS)]
    loop = PaddedBatches(texts, predictor, max(map(len, texts)))
    trainer = Trainer(bench.size(name), bench.device)
    yield {"model": name, "way": "predicted in the loop", **_measured(trainer, iter(loop))}


def _measured(trainer: Trainer, batches: Iterator[Any]) -> Row:
    seen: list[tuple[float, float]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            try:
                seen.append((torch.cuda.utilization(), 1e-3 * torch.cuda.power_draw()))
            except Exception:  # noqa: BLE001 - no GPU, or no NVML
                return

    thread = threading.Thread(target=watch)
    thread.start()
    start_s = time.perf_counter()
    residues = trainer.train(batches, {}, "")
    taken_s = time.perf_counter() - start_s
    ended.set()
    thread.join()
    use, watts = (mean(values) for values in zip(*seen, strict=True)) if seen else (None, None)
    return {"residues/s": residues / taken_s, "GPU busy, %": use, "W": watts}
