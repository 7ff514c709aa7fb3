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

import numpy as np

from benchmarks.harness.proteins import read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.peers.structure_loop import PaddedBatches, Trainer, save_predictor
from dataset.structures.batches import StructureSource
from dataset.structures.conversion import convert_structures
from dataset.structures.predictions import PredictedStructures, centred
from dataset.structures.store import StructureStore
from inference.folding.job import FoldingSettings, predict_structures
from inference.folding.predictors import EsmFold
from train_config.diffusion_schema import DiffusionSection
from train_config.schema import BackboneSection, DataSection

TRAINING, CACHE = "training on structures", "a structure"
KEPT, IN_LOOP = "structures kept, packed", "predicted in the loop, padded"
FOUND, PREDICTED = "found in the cache", "predicted"
PROTEINS, LONGEST, TOKENS = 16, 128, 1024


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    some = spread_by_length(proteins.sequences, 8 if setting.quick else PROTEINS)
    sequences = [text.replace("U", "C").replace("B", "N").replace("Z", "Q")[:LONGEST] for text in some]
    weights = save_predictor(setting.folder / "esmfold")
    of = FoldingSettings("esmfold", str(weights), setting.folder / "predictions", "cpu")
    report = predict_structures(sequences, of, batch_tokens=1024, cache_bytes=10**10)
    predictor = EsmFold(str(weights), "cpu")
    path = _save_store(setting.folder / "store", sequences)
    store = StructureStore(path, predictions=PredictedStructures(report.folder))
    facts: Facts = {**proteins.facts, "proteins": len(sequences), "residues": sum(map(len, sequences))}
    source = StructureSource(store, DiffusionSection(noise=0.0), max_length=LONGEST, seed=0, training=True)
    ours, theirs = (Trainer(BackboneSection(source="esm2_t6_8M")) for _ in range(2))

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


def _same(atoms: Any, found: Any) -> Facts:
    """Hold kept coordinates to the predictor's."""
    largest = float(np.abs(atoms.astype(np.float32) - centred(found)).max())
    if largest > 0.5:
        raise WrongWorkError(f"coordinates differ by {largest:.2f} Å")
    return {"largest difference of a coordinate, Å": round(largest, 3)}


def _save_store(folder: Path, sequences: list[str]) -> Path:
    fasta = folder.with_suffix(".fasta")
    fasta.write_text("".join(f">p{number}\n{text}\n" for number, text in enumerate(sequences)))
    convert_structures([str(fasta)], folder, DataSection(validation_share=0))
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
