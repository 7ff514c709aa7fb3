"""Structures predicted while training runs, in the order in which it wants them: shards in the cache, which the workers
read as they come (:class:`esmeray.dataset.structures.predictions.PredictedStructures`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.plan import Indices, longest_first
from esmeray.dataset.batches.steps import TrainingSteps, ValidationSteps
from esmeray.dataset.structures.predictions import FAILURE_FILE
from esmeray.dataset.structures.store import StructureStore
from esmeray.inference.folding.job import FoldingSettings, actors, predict_structures
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.training.config import Config

_WINDOW = 8
"""Batches of the predictor within which sequences are sorted by length."""
_PATIENCE_S = 15.0


@contextmanager
def predicting(config: Config, store: Path) -> Iterator[Config]:
    """Predict what is missing until this is left; Ray is connected. Yields the config with the predictor's own folder.

    Where predicting fails, the reason is left there for the workers that wait. Raises ConfigError where the predictor
    can't be loaded, or training would take every GPU.
    """
    wanted, ended = config.data.predictions, threading.Event()
    assert wanted.folder is not None and wanted.model is not None
    cache = Path(wanted.folder).absolute()
    if any(cache.glob("shard-*")):  # the folder that 'esmeray design fold' printed
        cache = cache.parent
    on_gpu = bool(ray.cluster_resources().get("GPU"))
    if on_gpu and config.ray.num_workers == "auto":
        raise ConfigError("ray.num_workers auto takes every GPU: give a number that leaves some to the predictor")
    cpus, modules = max(1, wanted.cpus_per_worker), tuple(wanted.predictor_module)
    device = "cuda" if on_gpu else "cpu"
    settings = FoldingSettings(wanted.predictor, wanted.model, cache, device, modules, cpus, "data.predictions")
    workers = actors(settings, wanted.workers, wanted.cpus_per_worker, wanted.gpus_per_worker, ended=ended)
    folder = cache / workers.loaded

    def work() -> None:
        try:
            predict_structures(
                sequences_in_order(config, store),
                settings,
                tokens=wanted.tokens,
                cache_bytes=None,
                plan=in_order,
                workers=workers,
            )
        except Exception as error:  # noqa: BLE001 - the workers raise it
            folder.mkdir(parents=True, exist_ok=True)
            reason = str(error).strip().splitlines()[-1]
            (folder / FAILURE_FILE).write_text(f"predicting structures failed: {reason}", encoding="utf-8")

    thread = threading.Thread(target=work, name="predicting", daemon=True)
    thread.start()
    predictions = config.data.predictions.model_copy(update={"folder": str(folder)})
    try:
        yield config.model_copy(update={"data": config.data.model_copy(update={"predictions": predictions})})
    finally:
        ended.set()
        thread.join(_PATIENCE_S)


def sequences_in_order(config: Config, path: Path) -> list[str]:
    """Sequences without a structure as the first epoch wants them; the held-out ones where it is evaluated first."""
    store = StructureStore(path)
    source = StructureSource(
        store, config.model.diffusion, max_length=config.data.max_length, seed=config.run.seed, training=True
    )
    plan = TrainingSteps(source, store.training, batch=config.batch, seed=config.run.seed).plan(0)
    batches = [plan.batch_records(batch) for batch in range(plan.num_batches)]
    held_out = ValidationSteps(
        source, store.validation, batch=config.batch, max_batches=config.training.evaluation_batches
    )
    before = config.training.evaluate_every_steps * plan.batches_per_step
    batches[before:before] = held_out.records
    unknown = set(store.unknown_records.tolist())
    records = dict.fromkeys(record for batch in batches for record in batch.tolist() if record in unknown)
    texts = [store.store.text(record) for record in records]
    return [text for text in texts if len(text) <= config.data.max_length]


def in_order(lengths_N: NDArray[np.int64], budget: int) -> list[Indices]:
    """Places of the sequences of each batch, of like lengths within a window, one window after the other."""
    windows_N = np.cumsum(lengths_N) // (_WINDOW * budget)
    batches = []
    for window in np.unique(windows_N):
        places = np.flatnonzero(windows_N == window)
        batches += [places[batch] for batch in longest_first(lengths_N[places], budget)]
    return batches
