"""Copies of the training state in host memory, every few steps. A lost worker costs only the steps since the last copy.

Each worker keeps its newest two copies in its own folder, which outlives the process but not the machine:

    /dev/shm/esmeray-<run>/rank-00000/
        .lock                    held by the worker's process
        step-00000012/           same layout as a checkpoint on disk, with this worker's shards only

A worker reads only its own folder. Therefore every worker's copy includes the model file, which on disk only rank 0
writes. A copy is used if the number of workers is unchanged, each finds its own copy intact, and no checkpoint on disk
is as new. A worker that moved to another machine finds no copy there. When a worker starts on a machine, it removes
folders that belong to no living process.
"""

import hashlib
import logging
import shutil
import socket
from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.common.publishing import Lock, take_lock
from esmeray.run_folder.checkpoints import MODEL_FILE, CheckpointFolder, CheckpointStore, Manifest
from esmeray.run_folder.job import LOCK_FILE
from esmeray.training.checkpoints.writer import CheckpointWriter
from esmeray.training.section import CheckpointSection

SHARED_MEMORY = Path("/dev/shm")
COPIES = 2
"""The newest complete copy, plus the one before it or the next one, which is being written."""

_PREFIX = "esmeray-"
_LOG = logging.getLogger(__name__)


def copy_bytes(parameters: int, *, stage: int, world_size: int, precision: str, weight_mean: bool = False) -> int:
    """Size of one worker's copy in bytes, given the number of trained parameters.

    A copy has the fp32 weights, their mean if it is kept, and AdamW's moments.
    """
    # In mixed precision the optimizer holds fp32 weights in addition to the model file's.
    mixed = precision != "fp32"
    # Up to ZeRO-2 every worker's copy has the whole model file. From ZeRO-1 on the optimizer state is divided.
    weights = 0 if stage == 3 else (2 if mixed else 4) * parameters
    state = (12 if mixed or stage else 8) + 4 * weight_mean
    return weights + state * parameters // (world_size if stage else 1)


class MemoryState:
    """This worker's copies of the state of one run under the same settings (``identity``). Every worker makes the same
    calls.

    ``size_bytes``: size of one copy. Raises ConfigError if two copies of all workers of a machine exceed its memory
    limit.
    """

    def __init__(
        self, identity: str, section: CheckpointSection, context: WorkerContext, control: ControlGroup, size_bytes: int
    ) -> None:
        self._rank, host = context.rank, socket.gethostname()
        folder = SHARED_MEMORY / f"{_PREFIX}{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        sweep(_names(folder, "rank-*"))  # frees memory, e.g. copies of this run with another number of workers
        control.all_true(True)  # measure only after all workers have swept
        workers = control.gather((host, size_bytes, _room(folder, section.memory_limit_gib)))
        _check_room(workers)
        folder.mkdir(mode=0o700, exist_ok=True)  # other users must not read the weights
        sweep([folder / f"rank-{rank:05d}" for rank, (of_host, *_) in enumerate(workers) if of_host == host])
        # A store per worker, so that no worker waits for another's part of a copy.
        self._store = CheckpointStore(folder / f"rank-{context.rank:05d}")
        self._lock: Lock | None = take_lock(self._store.root / LOCK_FILE, shared=True)
        self._store.sweep()
        kept = section.model_copy(update={"keep_last": COPIES, "keep_best": 0})
        self._writer = CheckpointWriter(self._store, context.rank, [context.rank], kept)

    def write(self, shards: list[tuple[str, Any]], manifest: Manifest, control: ControlGroup) -> None:
        """Start writing a copy. A failed write is only logged, since checkpoints on disk remain."""
        try:
            self._writer.wait()
        except ResourceError as error:
            _LOG.warning("the training state was not copied to memory: %s", error)
        control.all_true(True)  # every worker's newest copy is complete, so the one before it can go
        self._store.prune(keep_last=1, keep_best=0)
        self._writer.write([(self._as_rank_0(name), state) for name, state in shards], manifest)

    def common(self, control: ControlGroup) -> list[CheckpointFolder]:
        """Return this worker's copies of the steps that all workers have a copy of. They may still be damaged."""
        # A worker that was lost between two writes has an older copy than the others.
        steps = control.gather([folder.step for folder in self._store.complete()])
        return [self._store.folder(step) for step in set.intersection(*map(set, steps))]

    def discard_after(self, step: int) -> None:
        """Remove copies that are newer than the step that training resumes from."""
        for folder in self._store.complete():
            if folder.step > step:
                shutil.rmtree(folder.path)

    def close(self, keep: bool = False) -> None:
        """Remove the copies, or keep them for the next attempt. May be called again."""
        if self._lock is None:
            return
        # Raise nothing: the run has already ended or failed for another reason.
        self._writer.give_up()
        if not keep:
            shutil.rmtree(self._store.root, ignore_errors=True)
            with suppress(OSError):  # fails while another worker's copies are there
                self._store.root.parent.rmdir()
        self._lock.close()
        self._lock = None

    def _as_rank_0(self, name: str) -> str:
        """Name the model file after rank 0: under ZeRO-3 it is named after its worker, and loading expects rank 0's
        name."""
        is_model = name.endswith(MODEL_FILE)
        return name.replace(f"zero_pp_rank_{self._rank}_mp", "zero_pp_rank_0_mp") if is_model else name


def sweep(living: Iterable[Path] = ()) -> None:
    """Remove copies of processes on this machine that have ended, except the folders in ``living``."""
    locks = [_names(folder, f"rank-*/{LOCK_FILE}") for folder in SHARED_MEMORY.glob(f"{_PREFIX}*")]
    # If the lock can be taken, its process has ended.
    for lock in chain(*locks):
        if lock.parent not in living:
            # A lock that is held, or belongs to another user, can't be taken: its folder stays.
            with suppress(OSError, ConfigError), closing(take_lock(lock, 0)):
                shutil.rmtree(lock.parent)
                lock.parent.parent.rmdir()


def _names(folder: Path, pattern: str) -> list[Path]:
    with suppress(FileNotFoundError):  # another process swept it in the meantime
        return list(folder.glob(pattern))
    return []


def _room(folder: Path, limit_gib: float | None) -> float:
    """Bytes that this run may use on this machine, including its present copies."""
    # The run's next copies replace the present ones.
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(SHARED_MEMORY).free + present
    return free if limit_gib is None else min(free, limit_gib * 2**30)


def _check_room(workers: list[tuple[str, int, float]]) -> None:
    for host, _, room in workers:
        needed = COPIES * sum(size for other, size, _ in workers if other == host)
        if needed > room:
            raise ConfigError(
                f"checkpoint.memory_every_steps: {COPIES} copies of the state need {needed / 2**30:.3g} GiB "
                f"on {host}, but {SHARED_MEMORY} and checkpoint.memory_limit_gib leave {room / 2**30:.3g} "
                f"GiB: raise the limit or enlarge {SHARED_MEMORY}, or set checkpoint.memory_every_steps to none"
            )
