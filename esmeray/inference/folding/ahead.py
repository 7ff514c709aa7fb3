"""Structures predicted while training runs, in the order in which training needs them.

They are shards of the cache. The workers read them as they arrive
(:class:`esmeray.dataset.structures.predictions.PredictedStructures`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray

from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.plan import Indices, longest_first
from esmeray.dataset.batches.steps import TrainingSteps, ValidationSteps
from esmeray.dataset.section import BatchSection, DataSection, PredictionsSection
from esmeray.dataset.structures.predictions import FAILURE_FILE
from esmeray.dataset.structures.store import StructureStore
from esmeray.inference.folding.job import FoldingSettings, actors, predict_structures
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.tasks.diffusion.section import DiffusionSection
from esmeray.training.section import TrainingSection

_WINDOW = 8
"""Batches per window in which sequences are sorted by length.

A larger window fills batches better, but departs further from training's order.
"""
_BATCH_RESIDUES = 1024
"""Maximum residues of a batch of predictions, as in ``design fold``."""
_PATIENCE_S = 15.0
"""Seconds to wait for the predictor after the run has ended.

A batch of long sequences may take minutes and isn't needed any more.
"""


@contextmanager
def predicting(section: PredictionsSection, cluster: RaySection, sequences: Callable[[], list[str]]) -> Iterator[Path]:
    """Predict the missing structures in the background until the context exits. Yield the predictor's folder.

    Ray must be connected. If prediction fails, the reason is written to the folder for the waiting workers.

    Raises ConfigError if the predictor can't be loaded or if training would take every GPU.
    """
    assert section.folder is not None and section.model is not None
    named = Path(section.folder).absolute()
    cache = named.parent if any(named.glob("shard-*")) else named  # the folder that 'esmeray design fold' prints
    on_gpu = bool(ray.cluster_resources().get("GPU"))
    if on_gpu and cluster.num_workers == "auto":
        raise ConfigError("ray.num_workers auto uses all GPUs: give a number that leaves some for the predictor")
    settings = FoldingSettings(
        section.predictor,
        section.model,
        cache,
        device="cuda" if on_gpu else "cpu",
        cpus=1,
    )
    ended = threading.Event()
    # No cores are reserved: the predictor shares the ones of training.
    workers = actors(settings, 1, 0, ended=ended)
    folder = cache / workers.loaded

    def work() -> None:
        try:
            # Listed in the thread, because planning a large store takes a while, and training may start meanwhile.
            # The cache is not bounded: workers would wait forever for a structure that was removed.
            predict_structures(
                sequences(), settings, tokens=_BATCH_RESIDUES, cache_bytes=None, plan=in_order, workers=workers
            )
        except Exception as error:  # noqa: BLE001 - the workers raise it
            folder.mkdir(parents=True, exist_ok=True)
            reason = str(error).strip().splitlines()[-1]
            (folder / FAILURE_FILE).write_text(f"predicting structures failed: {reason}", encoding="utf-8")

    thread = threading.Thread(target=work, name="predicting", daemon=True)
    thread.start()
    try:
        yield folder
    finally:
        # End the thread before Ray shuts down: a later Ray call would start a new cluster.
        ended.set()
        thread.join(_PATIENCE_S)


def sequences_in_order(
    path: Path,
    data: DataSection,
    diffusion: DiffusionSection,
    batch: BatchSection,
    training: TrainingSection,
    seed: int,
) -> list[str]:
    """Sequences without a structure in the order of the first epoch, with held-out ones at its first evaluation."""
    store = StructureStore(path)
    source = StructureSource(store, diffusion, max_length=data.max_length, seed=seed, training=True)
    plan = TrainingSteps(source, store.training, batch=batch, seed=seed).plan(0)
    batches = [plan.batch_records(number) for number in range(plan.num_batches)]
    held_out = ValidationSteps(source, store.validation, batch=batch, max_batches=training.evaluation_batches)
    before = training.evaluate_every_steps * plan.batches_per_step
    batches[before:before] = held_out.records
    unknown = set(store.unknown_records.tolist())
    records = dict.fromkeys(record for batch_records in batches for record in batch_records.tolist())
    texts = [store.store.text(record) for record in records if record in unknown]
    # Workers don't wait for longer ones (PredictedStructures.longest), because a predictor's memory grows
    # quadratically.
    return [text for text in texts if len(text) <= data.max_length]


def in_order(lengths_N: NDArray[np.int64], budget: int) -> list[Indices]:
    """Indices of the sequences of each batch, sorted by length within windows that keep the given order."""
    windows_N = np.cumsum(lengths_N) // (_WINDOW * budget)
    windows = [np.flatnonzero(windows_N == window) for window in np.unique(windows_N)]
    return [members[batch] for members in windows for batch in longest_first(lengths_N[members], budget)]
