"""Write a checkpoint: copy the state to memory during the step, write files in the background.

DeepSpeed saves and loads through :class:`ShardFiles`. It copies the state to host memory, and unpickles only tensors
and a few plain classes (DeepSpeed's own engine would run code in a planted file). :class:`CheckpointWriter` writes and
hashes the copies. Once every rank's files are there, rank 0 gives the folder its final name. Ranks wait for files and
not in collectives, so that writing never blocks the collectives of training steps.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from esmeray.common.errors import CheckpointError, ResourceError, first_line
from esmeray.common.publishing import is_disk_full, named_errors, sync, write_atomically
from esmeray.run_folder.checkpoints import (
    MANIFEST,
    PARTIAL_SUFFIX,
    CheckpointFolder,
    CheckpointStore,
    FileEntry,
    Manifest,
    sha256_of,
)
from esmeray.run_folder.paths import no_space
from esmeray.training.section import CheckpointSection

PEERS_TIMEOUT_S = 600.0
GIVE_UP_S = 20.0
"""Seconds that the checkpoint in progress gets when a run fails."""

POLL_S = 0.02
SAFE_CLASSES = [LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum]
"""Classes in a DeepSpeed 0.19.8 checkpoint, in addition to tensors and plain containers."""


class ShardFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine: collects copies to write, and loads files through ``read``."""

    def __init__(self) -> None:
        self.collected: list[tuple[Path, Any]] = []
        self.read: Callable[[Path, Any], Any] = load_tensors

    def create(self, info: Any) -> None: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def save(self, state_dict: Any, path: str) -> None:
        self.collected.append((Path(path), copy_to_host(state_dict)))

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.read(Path(path), map_location)

    def commit(self, info: Any) -> bool:
        return True


def load_tensors(path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Load tensors, plain containers and DeepSpeed's few classes. No code of the file is run.

    ``mmap``: read a tensor's values when they are used. Raises CheckpointError if the file contains anything else.
    """
    try:
        with torch.serialization.safe_globals(SAFE_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises pickle, zip and runtime errors alike; all mean an unusable file
        raise CheckpointError(
            f"{path}: contains objects other than tensors; it was not loaded and no code was run ({first_line(error)})"
        ) from error


def copy_to_host(value: Any) -> Any:
    """Return a deep copy with every tensor in host memory, detached from the original that training changes."""
    if isinstance(value, torch.Tensor):
        # A copy of a view must not bring its whole storage into the file.
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return type(value)((key, copy_to_host(item)) for key, item in value.items())
    # Compare types, not isinstance: the class of a named tuple takes no iterable.
    return type(value)(map(copy_to_host, value)) if type(value) in (list, tuple) else value


class CheckpointWriter:
    """Writer of this rank's part of each checkpoint. The first of ``ranks`` completes it and calls ``on_complete``.

    ``ranks``: the ranks whose parts the store holds, i.e. all workers or the workers of one node.
    ``keep_step``: step of a checkpoint that is kept in addition to the section's.
    """

    def __init__(
        self,
        store: CheckpointStore,
        rank: int,
        ranks: Sequence[int],
        section: CheckpointSection,
        on_complete: Callable[[CheckpointFolder], None] | None = None,
        keep_step: int | None = None,
    ):
        self._store, self._rank, self._ranks = store, rank, ranks
        self._section, self._on_complete, self._keep_step = section, on_complete, keep_step
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._given_up = threading.Event()

    def write(self, shards: list[tuple[str, Any]], manifest: Manifest) -> None:
        """Write ``(name, state)`` pairs and the manifest of this checkpoint, whose ``files`` are still empty.

        A state of type ``bytes`` is written unchanged, any other by ``torch.save``. Waits for the previous checkpoint.
        Raises ResourceError if that could not be written.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write_all, args=(shards, manifest), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises ResourceError if a checkpoint could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def give_up(self) -> None:
        """Wait until nothing is being written, with a short limit for other ranks' parts. Raises nothing."""
        if self._thread is not None:
            # The part of a failed rank never comes; the part of a slow rank still may.
            self._thread.join(GIVE_UP_S)
            self._given_up.set()
            self._thread.join()

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            if not isinstance(error, OSError):
                raise error
            if is_disk_full(error):
                raise ResourceError(no_space(f"a checkpoint in {self._store.root}")) from error
            raise ResourceError(f"checkpoint in {self._store.root} could not be written: {error}") from error

    def _write_all(self, shards: list[tuple[str, Any]], manifest: Manifest) -> None:
        partial = self._store.folder(manifest.position.step).path.with_suffix(PARTIAL_SUFFIX)
        try:
            partial.mkdir(parents=True, exist_ok=True)  # without ZeRO only rank 0 has shards
            entries = [_write_shard(partial, name, state) for name, state in shards]
            # Written last: it tells the first rank that this rank's shards are complete.
            write_atomically(_rank_file(partial, self._rank), json.dumps([entry.model_dump() for entry in entries]))
            if self._rank == self._ranks[0]:
                self._complete(partial, manifest)
        except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._error = error
            # Free the space: otherwise a full disk stays full.
            for name, _ in shards:
                with suppress(OSError):
                    (partial / name).unlink()

    def _complete(self, partial: Path, manifest: Manifest) -> None:
        files = {rank: self._entries_of(partial, rank) for rank in self._ranks}
        sealed = manifest.model_copy(update={"files": files}).sealed()
        for rank in files:
            _rank_file(partial, rank).unlink()
        # Manifest first, then the name: a folder with its final name is complete.
        write_atomically(partial / MANIFEST, sealed.model_dump_json(indent=1))
        folder = self._store.folder(manifest.position.step)
        partial.rename(folder.path)
        sync(folder.path.parent)  # the name must survive a power failure before older checkpoints are removed
        self._store.write_latest(folder)
        self._store.prune(self._section.keep_last, self._keep_step)
        if self._on_complete is not None:
            self._on_complete(folder)

    def _entries_of(self, partial: Path, rank: int) -> list[FileEntry]:
        deadline = time.monotonic() + PEERS_TIMEOUT_S
        path = _rank_file(partial, rank)
        while not path.exists():
            # This runs in a background thread: training continues.
            if self._given_up.is_set() or time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not write its part of the checkpoint in time")
            time.sleep(POLL_S)
        return [FileEntry(**entry) for entry in json.loads(path.read_text())]


def _write_shard(folder: Path, name: str, state: Any) -> FileEntry:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_errors(path), path.open("wb") as file:
        try:
            if isinstance(state, bytes):
                file.write(state)
            else:
                torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch 2.13 masks the disk's error with "unexpected pos"
            raise
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=name, size_bytes=path.stat().st_size, sha256=sha256_of(path))


def _rank_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"
