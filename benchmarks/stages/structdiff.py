"""Training sequence diffusion from kept structures, beside predicting each structure when its batch is made.

Both train the same model by the same AdamW in fp32 on the same proteins and structures, those of the same predictor
(ESMFold of transformers, random weights, far smaller than the published one, which only helps the peer). The peer is
the loop that people have: a DataLoader without processes, two proteins a batch, padded to the longest, the prediction
inside. Ours takes the structures from the cache, packed to a token budget. Residues count, padding does not.

The second case is the cache alone: a structure found in it, beside predicting it. How long a step waits for its data,
and how busy the cores are, is among the facts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.proteins import read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError

TRAINING, CACHE = "training on structures", "a structure"
KEPT, IN_LOOP = "structures kept, packed", "predicted in the loop, padded"
FOUND, PREDICTED = "found in the cache", "predicted"
PROTEINS, LONGEST, TOKENS = 16, 128, 1024


def _cases(setting: Setting) -> Iterator[Case]:
    import numpy as np

    from benchmarks.peers.structure_loop import PaddedBatches
    from dataset.structures.batches import StructureSource
    from dataset.structures.predictions import PredictedStructures
    from dataset.structures.store import StructureStore
    from inference.folding.job import FoldingSettings, predict_structures
    from inference.folding.predictors import EsmFold
    from train_config.diffusion_schema import DiffusionSection

    proteins = read_proteins(setting.fasta)
    some = spread_by_length(proteins.sequences, 8 if setting.quick else PROTEINS)
    sequences = [text.replace("U", "C").replace("B", "N").replace("Z", "Q")[:LONGEST] for text in some]
    weights = _save_predictor(setting.folder / "esmfold")
    of = FoldingSettings("esmfold", str(weights), setting.folder / "predictions", "cpu")
    report = predict_structures(sequences, of, batch_tokens=1024, cache_bytes=10**10)
    predictor = EsmFold(str(weights), "cpu")
    path = _save_store(setting.folder / "store", sequences)
    store = StructureStore(path, predictions=PredictedStructures(report.folder))
    facts: Facts = {**proteins.facts, "proteins": len(sequences), "residues": sum(map(len, sequences))}
    source = StructureSource(store, DiffusionSection(noise=0.0), max_length=LONGEST, seed=0, training=True)
    ours, theirs = _Trainer(), _Trainer()

    def packed() -> float:
        lengths = source.token_lengths(np.arange(len(store)))
        order = np.argsort(lengths, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(np.cumsum(lengths[order]) // TOKENS)) + 1)
        batches = source.batches((0, group) for group in groups)
        return ours.train(
            ((made.batch, made.num_tokens - 2 * made.batch.num_sequences) for made in batches), facts, KEPT
        )

    def padded() -> float:
        return theirs.train(iter(PaddedBatches(sequences, predictor, max(map(len, sequences)))), facts, IN_LOOP)

    yield Case(TRAINING, "residues/s", (Contender(KEPT, packed), Contender(IN_LOOP, padded)), rounds=3, facts=facts)

    middle = len(sequences) // 2
    text = sequences[middle]

    def find() -> float:
        start_s = time.perf_counter()
        for _ in range(20):
            store.atoms(middle, 0, len(text))
        return 1e3 * (time.perf_counter() - start_s) / 20

    def predict() -> float:
        start_s = time.perf_counter()
        predictor.predict([text])
        return 1e3 * (time.perf_counter() - start_s)

    contenders = Contender(FOUND, find, "value"), Contender(PREDICTED, predict, "value")
    check = partial(_same, store.atoms(middle, 0, len(text))[0], predictor.predict([text])[0].coordinates)
    yield Case(CACHE, "ms", contenders, better="lower", rounds=3, check=check, facts={"residues": len(text)})


class _Trainer:
    """A model and AdamW."""

    def __init__(self) -> None:
        import torch

        from model.tasks.diffusion import SequenceDiffusion
        from train_config.schema import BackboneSection, ModelSection

        section = ModelSection(task="diffusion", backbone=BackboneSection(source="esm2_t6_8M"))
        self._model = SequenceDiffusion.build(section, 0)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def train(self, batches: Iterator[tuple[Any, int]], facts: Facts, name: str) -> float:
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
            output = self._model(batch)
            (output.loss_sum / output.num_targets.clamp(min=1)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            residues += number
        facts[f"share of a step that waits for data, {name}"] = round(waited_s / (time.perf_counter() - start_s), 4)
        facts[f"busy share of the cores, {name}"] = round(psutil.cpu_percent() / 100, 2)
        return residues


def _same(atoms: Any, found: Any) -> Facts:
    """Hold kept coordinates to the predictor's."""
    import numpy as np

    from dataset.structures.predictions import centred

    largest = float(np.abs(atoms.astype(np.float32) - centred(found)).max())
    if largest > 0.5:
        raise WrongWorkError(f"coordinates differ by {largest:.2f} Å")
    return {"largest difference of a coordinate, Å": round(largest, 3)}


def _save_store(folder: Path, sequences: list[str]) -> Path:
    from dataset.structures.conversion import convert_structures
    from train_config.schema import DataSection

    fasta = folder.with_suffix(".fasta")
    fasta.write_text("".join(f">p{number}\n{text}\n" for number, text in enumerate(sequences)))
    convert_structures([str(fasta)], folder, DataSection(validation_share=0))
    return folder


def _save_predictor(folder: Path) -> Path:
    """ESMFold with 6 layers of 320 channels and 4 folding blocks, in place of 36 of 2,560 and 48, recycled once."""
    import torch
    from transformers import EsmConfig, EsmForProteinFolding
    from transformers.models.esm.configuration_esm import get_default_vocab_list

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


STAGE = Stage(
    name="structdiff",
    summary="training on kept structures, beside predicting them in the loop; a structure from the cache",
    cases=_cases,
    comparisons=(
        Comparison(TRAINING, KEPT, IN_LOOP, {"cpu": 4.0}),
        Comparison(CACHE, FOUND, PREDICTED, {"cpu": 1000.0}),
    ),
    packages=("transformers",),
    distributions=("transformers",),
)
