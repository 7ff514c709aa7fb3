"""Structures of many sequences, predicted once each and cached, by this process or by Ray actors.

The cache holds coordinates and confidences by sequence hash, in a folder named for the predictor's fingerprint. Each
batch is a shard with its own name. Several jobs can therefore write at once, and a stopped job resumes.

Structures may also be predicted while training runs, in the order in which training needs them. The workers read them
as they arrive (:class:`esmeray.dataset.structures.predictions.PredictedStructures`).
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.dataset.batches.plan import Indices, longest_first
from esmeray.dataset.batches.steps import TrainingSteps, ValidationSteps
from esmeray.dataset.embeddings.cache import bound_cache, merge_shards
from esmeray.dataset.section import BatchSection, DataSection, PredictionsSection
from esmeray.dataset.structures.predictions import FAILURE_FILE, PredictedStructures, keep, keys
from esmeray.dataset.structures.store import StructureStore
from esmeray.inference.folding.predictors import predictor
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.tasks.diffusion.section import DiffusionSection
from esmeray.training.section import TrainingSection

if TYPE_CHECKING:
    from esmeray.cluster.actor_pool import ActorPool

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Times that a batch may lose its actor, before it counts as the reason."""
_MERGED = 256
"""Batches between merges of their shards. Each shard is an open file in every reader."""
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


@dataclass(frozen=True)
class FoldingSettings:
    """Predictor and cache of a folding job.

    Attributes:
        predictor, source: predictor name, after its module if that is to be imported, and its weights.
        cache: folder shared by all nodes.
        cpus: cores per process; None for all.
        section: settings section that messages name.
    """

    predictor: str
    source: str
    cache: Path
    device: str
    cpus: int | None = None
    section: str = "fold"


@dataclass(frozen=True)
class FoldingReport:
    """Result of a folding job.

    Attributes:
        folder: folder with the predictions.
        sequences: number of distinct sequences.
        cached: number of sequences that were in the cache already.
        removed_shards: shards removed to bound the cache.
    """

    folder: Path
    sequences: int
    cached: int
    removed_shards: int


class Folder:
    """Predicts batches of structures and writes them to the cache. One per process; also the Ray actor class."""

    def __init__(self, settings: FoldingSettings) -> None:
        self._settings = settings

    def load(self) -> str:
        """Load the predictor and return its fingerprint."""
        settings = self._settings
        if settings.cpus is not None:
            torch.set_num_threads(settings.cpus)
        module, _, kind = settings.predictor.rpartition(":")
        if module:  # imported here, because an actor's process lacks the driver's imports
            import_module(module)
        self._predictor = predictor(kind, settings.source, settings.device, settings.section)
        return self._predictor.fingerprint

    def run(self, sequences: list[str]) -> int:
        """Predict structures, write them to the cache and return their number.

        Raises DataError if a coordinate is not finite, ResourceError if the device is out of memory.
        """
        try:
            predicted = self._predictor.predict(sequences)
        except torch.OutOfMemoryError as error:
            # The batch is not split as in other inference, because the last bits depend on the batch. A resumed job,
            # also on another GPU, must compute the same batches.
            raise ResourceError(
                f"predicting {len(sequences)} sequences of up to {max(map(len, sequences))} residues is out of "
                f"memory: lower {self._settings.section}.tokens, or remove long sequences"
            ) from error
        # Checked before caching, because a cached structure is never predicted again.
        if not all(np.isfinite(structure.coordinates).all() for structure in predicted):
            raise DataError(f"{self._settings.source}: the model returns NaN or infinity; check its weights")
        keep(self._settings.cache / self._predictor.fingerprint, sequences, predicted)
        return len(sequences)


def actors(
    settings: FoldingSettings,
    count: int,
    cpus: int,
    *,
    ended: threading.Event | None = None,
) -> "ActorPool":
    """Start prediction actors, each with ``cpus`` reserved cores and, on CUDA, a GPU. Ray must be connected."""
    from esmeray.cluster.actor_pool import ActorPool  # imported here, because it imports Ray

    def same(first: str, other: str) -> None:
        if first != other:
            raise DataError(
                f"{settings.source}: the weights differ between nodes ({first}, {other}); copy the same model "
                "to all nodes"
            )

    return ActorPool(
        Folder,
        settings,
        count,
        {"num_cpus": cpus, "num_gpus": 1 if settings.device == "cuda" else 0},
        at_once=1,
        max_failures=MAX_FAILURES,
        log=log,
        ended=ended,
        same=same,
    )


def predict_structures(
    sequences: Sequence[str],
    settings: FoldingSettings,
    *,
    tokens: int,
    cache_bytes: int | None,
    plan: Callable[[NDArray[np.int64], int], list[Indices]] = longest_first,
    workers: "ActorPool | None" = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FoldingReport:
    """Predict the structures that the cache lacks.

    Args:
        plan: function that returns the indices of each batch.
        cache_bytes: maximum size of the cache; None for no bound.
        workers: :func:`actors`, closed at the end; None computes in this process.
        progress: called with the number of finished sequences and the total.
    """
    distinct = list(dict.fromkeys(sequences))
    local = Folder(settings)
    folder = settings.cache / (local.load() if workers is None else workers.loaded)
    try:
        (folder / FAILURE_FILE).unlink(missing_ok=True)  # from an earlier start; workers would give up at once
        absent = ~PredictedStructures(folder, "null").has(keys(distinct))
        lengths = np.array([len(sequence) for sequence in distinct], np.int64)
        # Planned over all sequences, so that a resumed job computes the same batches.
        planned = [indices[absent[indices]] for indices in plan(lengths, tokens)]
        batches = [[distinct[index] for index in indices.tolist()] for indices in planned if indices.size]
        cached = done = int(len(distinct) - absent.sum())
        progress(done, len(distinct))
        sizes = map(local.run, batches) if workers is None else workers.run(batches)
        for number, size in enumerate(sizes, 1):
            done += size
            progress(done, len(distinct))
            if number % _MERGED == 0:
                merge_shards(folder)
        merge_shards(folder)
    finally:
        if workers is not None:
            workers.close()
    removed = 0 if cache_bytes is None else bound_cache(settings.cache, cache_bytes)
    return FoldingReport(folder, len(distinct), cached, removed)


@contextmanager
def predicting(section: PredictionsSection, cluster: RaySection, sequences: Callable[[], list[str]]) -> Iterator[Path]:
    """Predict the missing structures in the background until the context exits. Yield the predictor's folder.

    Ray must be connected. If prediction fails, the reason is written to the folder for the waiting workers.

    Raises ConfigError if the predictor can't be loaded or if training would take every GPU.
    """
    import ray  # here: it takes a second, which predictions without actors don't need

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
        section="data.predictions",
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
