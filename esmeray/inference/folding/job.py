"""Structures of many sequences, predicted once each and cached: by this process, or by actors of a Ray cluster.

The cache has coordinates and confidences by sequence hash, in a folder of the predictor's fingerprint. Each batch is a
shard of it, under a name of its own, so that several jobs may write at once and one that was ended resumes.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.common.errors import DataError, ResourceError
from esmeray.dataset.batches.plan import Indices, longest_first
from esmeray.dataset.embeddings.cache import bound_cache, merge_shards
from esmeray.dataset.structures.predictions import FAILURE_FILE, PredictedStructures, keep, keys
from esmeray.inference.folding.predictors import predictor

if TYPE_CHECKING:
    from esmeray.cluster.actor_pool import ActorPool

log = logging.getLogger(__name__)

_MERGED = 256
"""Batches after which their shards are merged: each is an open file of whoever reads."""


@dataclass(frozen=True)
class FoldingSettings:
    """Predictor of a folding job, and its cache.

    Attributes:
        predictor, source: name and weights.
        cache: folder that all nodes see.
        modules: imported in each process, for predictors that they register.
        cpus: cores that a process computes on; None for all.
        section: of the settings, which messages name.
    """

    predictor: str
    source: str
    cache: Path
    device: str
    modules: tuple[str, ...] = ()
    cpus: int | None = None
    section: str = "fold"


@dataclass(frozen=True)
class FoldingReport:
    """Where the predictions are, distinct sequences, those that were there already, and shards removed to bound it."""

    folder: Path
    sequences: int
    cached: int
    removed_shards: int


class Folder:
    """Predicts batches and writes them. One for a process; an actor's own class on Ray."""

    def __init__(self, settings: FoldingSettings) -> None:
        self._settings = settings

    def load(self) -> str:
        """Load the predictor; its fingerprint."""
        settings = self._settings
        if settings.cpus is not None:
            torch.set_num_threads(settings.cpus)
        for module in settings.modules:  # here, as an actor's process has nothing of what the driver imported
            import_module(module)
        self._predictor = predictor(settings.predictor, settings.source, settings.device, settings.section)
        return self._predictor.fingerprint

    def run(self, sequences: list[str]) -> int:
        """Predict and write; returns the number of sequences.

        Raises DataError where a coordinate is not finite, ResourceError where memory runs out.
        """
        try:
            predicted = self._predictor.predict(sequences)
        except torch.OutOfMemoryError as error:
            # Not halved, as batches of inference are: the last bit depends on the batch, and a job that was ended or
            # moved to another GPU resumes with the batches that it would have taken.
            raise ResourceError(
                f"predicting {len(sequences)} sequences of up to {max(map(len, sequences))} residues needs more memory "
                f"than the device has: lower {self._settings.section}.tokens, or leave long sequences out"
            ) from error
        # Before it is cached: a structure that is there is never predicted again.
        if not all(np.isfinite(structure.coordinates).all() for structure in predicted):
            raise DataError(f"{self._settings.source}: gives NaN or infinity; check its weights")
        keep(self._settings.cache / self._predictor.fingerprint, sequences, predicted)
        return len(sequences)


def actors(
    settings: FoldingSettings,
    count: int,
    cpus: int,
    gpus: float,
    *,
    max_failures: int = 3,
    ended: threading.Event | None = None,
) -> "ActorPool":
    """Actors that predict, each with so many cores and, on CUDA, GPUs. Ray is connected."""
    from esmeray.cluster.actor_pool import ActorPool  # here: it imports Ray

    def same(first: str, other: str) -> None:
        if first != other:
            raise DataError(f"{settings.source}: nodes have different weights ({first}, {other}); give all the same")

    return ActorPool(
        Folder,
        settings,
        count,
        {"num_cpus": cpus, "num_gpus": gpus if settings.device == "cuda" else 0},
        at_once=1,
        max_failures=max_failures,
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
    """Predict what is not in the cache; ``progress`` gets the sequences done and all of them.

    ``plan`` gives the indices of each batch. ``cache_bytes`` bounds the cache, None does not. ``workers`` are
    :func:`actors`, closed at the end; None computes here.
    """
    distinct, local = list(dict.fromkeys(sequences)), Folder(settings)
    folder = settings.cache / (local.load() if workers is None else workers.loaded)
    try:
        (folder / FAILURE_FILE).unlink(missing_ok=True)  # of an earlier start: workers would give up at once
        absent = ~PredictedStructures(folder, "null").has(keys(distinct))
        # Planned over all, so that a resumed job takes the batches that it would have taken.
        planned = [indices[absent[indices]] for indices in plan(np.array([*map(len, distinct)], np.int64), tokens)]
        batches = [[distinct[index] for index in indices.tolist()] for indices in planned if indices.size]
        cached = done = int(len(distinct) - absent.sum())
        progress(done, len(distinct))
        for number, size in enumerate(map(local.run, batches) if workers is None else workers.run(batches), 1):
            done += size
            progress(done, len(distinct))
            if number % _MERGED == 0:
                merge_shards(folder)
        merge_shards(folder)
    finally:
        if workers is not None:
            workers.close()
    return FoldingReport(
        folder, len(distinct), cached, 0 if cache_bytes is None else bound_cache(settings.cache, cache_bytes)
    )
