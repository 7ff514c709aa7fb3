"""Copies of the state in the host's memory, every few steps: a worker that is lost costs no more than these.

Each worker keeps its newest two in a folder of its own, which outlives its process, not its machine:

    /dev/shm/esmeray-<run>/rank-00000/
        .lock                    held by the worker's process
        step-00000012/           as a checkpoint on disk, with this worker's shards alone

A worker reads its own folder and no other, so each has the model's file, which on disk rank 0 alone writes. A copy is
used where each of as many workers finds its own intact, and no checkpoint on disk is as new; one that moved to another
machine finds none there. What belongs to no living process is removed when a worker starts on the machine.
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
"""The newest whole one, and the one before or the next, which is being written."""

_PREFIX = "esmeray-"
_LOG = logging.getLogger(__name__)


def copy_bytes(parameters: int, *, stage: int, world_size: int, precision: str, weight_mean: bool = False) -> int:
    """Bytes of one worker's copy of so many trained parameters, their fp32 weights, their mean and AdamW's moments."""
    mixed = precision != "fp32"
    # Up to ZeRO-2 every worker has the model's file, whole; the optimizer's state is divided from ZeRO-1 on.
    weights = 0 if stage == 3 else (2 if mixed else 4) * parameters
    state = (12 if mixed or stage else 8) + 4 * weight_mean
    return weights + state * parameters // (world_size if stage else 1)


class MemoryState:
    """This worker's copies, of one run under the same settings (``identity``). Every worker makes the same calls.

    Raises ConfigError where two copies of all workers of a machine, of so many bytes each, do not fit there.
    """

    def __init__(
        self, identity: str, section: CheckpointSection, context: WorkerContext, control: ControlGroup, size_bytes: int
    ) -> None:
        self._rank, host = context.rank, socket.gethostname()
        folder = SHARED_MEMORY / f"{_PREFIX}{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        sweep(_names(folder, "rank-*"))  # copies of this run with other workers, say, need no room
        control.all_true(True)  # nobody measures before all have swept
        workers = control.gather((host, size_bytes, _room(folder, section.memory_limit_gib)))
        _check_room(workers)
        folder.mkdir(mode=0o700, exist_ok=True)  # weights are not for others to read
        sweep([folder / f"rank-{rank:05d}" for rank, (of_host, *_) in enumerate(workers) if of_host == host])
        # A store of its own: no worker waits for another's part of a copy.
        self._store = CheckpointStore(folder / f"rank-{context.rank:05d}")
        self._lock: Lock | None = take_lock(self._store.root / LOCK_FILE, shared=True)
        self._store.sweep()
        kept = section.model_copy(update={"keep_last": COPIES, "keep_best": 0})
        self._writer = CheckpointWriter(self._store, context.rank, [context.rank], kept)

    def write(self, shards: list[tuple[str, Any]], manifest: Manifest, control: ControlGroup) -> None:
        """Start writing a copy. What can't be written is only logged: there is still the disk."""
        try:
            self._writer.wait()
        except ResourceError as error:
            _LOG.warning("no copy of the state in memory: %s", error)
        control.all_true(True)  # every worker's newest is whole: now the one before it is not needed
        self._store.prune(keep_last=1, keep_best=0)
        self._writer.write([(self._as_rank_0(name), state) for name, state in shards], manifest)

    def common(self, control: ControlGroup) -> list[CheckpointFolder]:
        """The copies of the steps of which every worker has one. They may still be damaged."""
        # A worker that was lost between two writes has an older one than the others.
        steps = control.gather([folder.step for folder in self._store.complete()])
        return [self._store.folder(step) for step in set.intersection(*map(set, steps))]

    def discard_after(self, step: int) -> None:
        """Remove copies newer than the step that training resumes from."""
        for folder in self._store.complete():
            if folder.step > step:
                shutil.rmtree(folder.path)

    def close(self, keep: bool = False) -> None:
        """Remove the copies, or keep them for the next attempt. May be called again."""
        if self._lock is None:
            return
        # Nothing is raised: the run has ended or failed, by something else.
        self._writer.give_up()
        if not keep:
            shutil.rmtree(self._store.root, ignore_errors=True)
            with suppress(OSError):  # another worker's are there
                self._store.root.parent.rmdir()
        self._lock.close()
        self._lock = None

    def _as_rank_0(self, name: str) -> str:
        """Under ZeRO-3 the model's file is named after its worker, and looked for by rank 0's name."""
        is_model = name.endswith(MODEL_FILE)
        return name.replace(f"zero_pp_rank_{self._rank}_mp", "zero_pp_rank_0_mp") if is_model else name


def sweep(living: Iterable[Path] = ()) -> None:
    """Remove the copies of processes of this machine that have ended, but for these folders."""
    locks = [_names(folder, f"rank-*/{LOCK_FILE}") for folder in SHARED_MEMORY.glob(f"{_PREFIX}*")]
    # A lock that can be had is of a process that has ended, however it did.
    for lock in chain(*locks):
        if lock.parent not in living:
            # Where it is held, or another user's, it stays.
            with suppress(OSError, ConfigError), closing(take_lock(lock, 0)):
                shutil.rmtree(lock.parent)
                lock.parent.parent.rmdir()


def _names(folder: Path, pattern: str) -> list[Path]:
    with suppress(FileNotFoundError):  # another process swept it meanwhile
        return list(folder.glob(pattern))
    return []


def _room(folder: Path, limit_gib: float | None) -> float:
    """Bytes that this run may take on this machine, with what it has there."""
    # What the run has there is replaced by its next copies.
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(SHARED_MEMORY).free + present
    return free if limit_gib is None else min(free, limit_gib * 2**30)


def _check_room(workers: list[tuple[str, int, float]]) -> None:
    for host, _, room in workers:
        needed = COPIES * sum(size for other, size, _ in workers if other == host)
        if needed > room:
            raise ConfigError(
                f"checkpoint.memory_every_steps: {COPIES} copies of the state take {needed / 2**30:.3g} GiB on {host}, "
                f"where {SHARED_MEMORY} and checkpoint.memory_limit_gib leave {room / 2**30:.3g}: raise the limit or "
                f"enlarge {SHARED_MEMORY}, or set checkpoint.memory_every_steps to none"
            )
