"""A run in object storage: its folder on a node's disk is a working copy of the files at the run's URI.

    <uri>/config.yaml, metrics.jsonl, logs/, export/ ...   files changed on a node; with each checkpoint and at the end
    <uri>/checkpoints/step-00000015/
        ...                       the files of the workers
        rank-00002.json           manifest of the files that the node of worker 2 (its first worker) has uploaded
        manifest.json             manifest of all files, written by worker 0 when all parts are there

A checkpoint counts once its manifest is at the URI, and every start reads the manifests there. If the run is in a
folder that all nodes share, a mirror does nothing.
"""

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

from esmeray.common.errors import CheckpointError, EsmerayError, ResourceError
from esmeray.common.publishing import take_lock
from esmeray.common.remote import (
    AT_ONCE_S,
    Items,
    download,
    listing,
    local_path,
    read,
    remove,
    retried,
    storage,
    upload,
    write,
)
from esmeray.run_folder.checkpoints import MANIFEST, CheckpointFolder, CheckpointStore, Manifest
from esmeray.run_folder.paths import RunFolder

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds between checks for uploads of other nodes."""
ENDING_S = 10.0
"""Seconds to wait for the store at the end of a failed run."""
_METRICS, _OUTCOME, _REQUESTS = "metrics.jsonl", "outcome.json", ("stop.requested", "resize.requested")
_LEFT_THERE = ("checkpoints/", "export/", "evaluations/", "wandb/", *_REQUESTS)


def place_of(run: RunFolder) -> str:
    """Return a string that is equal for processes that see the same folder of a run."""
    return "" if run.uri is None else f"{socket.gethostname()}:{run.path}"


class RunMirror:
    """The working copy of this node. ``report`` gets a message if the store is unreachable.

    ``rank``: worker that uploads for its node; None for the driver. ``completed`` is called on worker 0 for each
    checkpoint that is complete at the URI.
    """

    def __init__(
        self,
        run: RunFolder,
        report: Callable[[str], None] = log.warning,
        rank: int | None = None,
        completed: Callable[[CheckpointFolder], None] = lambda folder: None,
    ) -> None:
        self.run, self._uri, self._report, self._rank, self._completed = run, run.uri or "", report, rank, completed
        self._root, self._checkpoints = f"{self._uri}/checkpoints", CheckpointStore(run.checkpoints)
        self._since_s = time.time()  # older files are already at the URI
        self._followed: Items = {}
        self._asked, self._idle, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._error: EsmerayError | None = None
        self._thread: threading.Thread | None = None
        self._locks = ExitStack()

    def pull(self, patience_s: float | None = None, checkpoints_only: bool = False) -> None:
        """Replace the working copy by the run's files at the URI; of checkpoints only the manifests are downloaded."""

        def work() -> None:
            items = listing(self._uri)
            for path in self.run.path.glob("checkpoints" if checkpoints_only else "[!.]*"):
                if path != self.run.logs:  # logs may contain stacks of workers that hung
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            kept = [name for name in items if not (checkpoints_only or name.startswith(_LEFT_THERE))]
            self._fetch(items, kept + [name for name in items if name.endswith(f"/{MANIFEST}")])

        self._patiently(work, patience_s)

    def fetched(self, folder: CheckpointFolder) -> CheckpointFolder:
        """Return the checkpoint with the files of all workers: this node's download from the URI."""
        if not self._uri:
            return folder
        return CheckpointFolder(local_path(f"{self._root}/{folder.path.name}"))

    def begin(self) -> None:
        """Upload the driver's files, remove the outcome of an earlier attempt, and follow worker 0 on another node."""

        def work() -> None:
            remove(f"{self._uri}/{_OUTCOME}")
            self._upload_files()
            self._followed = listing(self._uri)

        self._since_s = 0.0  # upload all files: a new run has none at the URI yet
        self._patiently(work, AT_ONCE_S)  # short patience, since the user waits at the terminal
        self._start(self._follow)

    @contextmanager
    def with_outcome(self) -> Iterator[None]:
        """Decorate an attempt so that the driver has worker 0's files when it ends."""
        try:
            yield
        finally:
            self.wait(ENDING_S)

    def start(self, step: int) -> None:
        """Start uploading in the background. Worker 0 first removes checkpoints after ``step``, which are written
        again."""
        if self._uri and self._rank == 0:
            self._locks.enter_context(closing(take_lock(self.run.first_worker)))
            # Compare names, whose numbers have leading zeros: checkpoints at the URI may not be on this node.
            newest = self._checkpoints.folder(step).path.name
            self._patiently(lambda: self._drop(lambda name: name > newest))
            for name in _REQUESTS:  # requests of an earlier attempt; the driver repeats its own
                self._patiently(partial(remove, f"{self._uri}/{name}"))
        self._start(self._upload)

    def check_now(self, folder: CheckpointFolder | None = None) -> None:
        """Wake the thread to check now for files to upload."""
        # Set before clearing idle: otherwise a check that began earlier could end between the two and count as this
        # one. Set again afterwards: the thread may have finished the first check by then.
        for act in (self._asked.set, self._idle.clear, self._asked.set):
            act()

    def wait(self, patience_s: float | None = None) -> None:
        """Wait until everything is uploaded. Raises ResourceError if the store is unreachable for longer than the
        setting."""
        if self._thread is None:
            return
        self.check_now()
        if not self._idle.wait(ENDING_S):
            self._report(f"waiting for the upload of {self.run.path} to {self._uri}")
            self._idle.wait(patience_s or storage().patience_s)
        if patience_s is None and not (self._idle.is_set() and self._error is None):
            raise self._error or ResourceError(f"{self._uri}: another node has not uploaded its part of a checkpoint")

    def close(self) -> None:
        self._closing.set()
        self._asked.set()
        self._locks.close()

    def save_files(self, *names: str) -> None:
        """Upload changed files whose names start with ``names``; a failure is only reported."""
        try:
            self._patiently(lambda: self._upload_files(names or ("",)), ENDING_S)
        except EsmerayError as error:
            self._report(f"not uploaded: {error}")

    def _patiently(self, work: Callable[[], Any], patience_s: float | None = None) -> Any:
        return retried(work, self._uri, patience_s or storage().patience_s, self._report) if self._uri else None

    def _start(self, work: Callable[[], bool | None]) -> None:
        if self._uri:
            # A daemon thread: an unreachable store must not keep the process from ending.
            self._thread = threading.Thread(target=self._loop, args=(work,), name="run-mirror", daemon=True)
            self._thread.start()

    def _loop(self, work: Callable[[], bool | None]) -> None:
        while not self._closing.is_set():
            self._asked.wait(POLL_S)
            self._asked.clear()  # before the work, so that a request during the work leads to another check
            is_left, self._error = False, None
            try:
                is_left = self._patiently(work)
            except EsmerayError as error:
                self._error = error
                self._report(str(error))
            if not is_left and not self._asked.is_set():
                self._idle.set()

    def _follow(self) -> None:
        # If worker 0 uses this folder, there is nothing to do. The lock is closed after an error too, so that a later
        # check can take it.
        with suppress(BlockingIOError), closing(take_lock(self.run.first_worker, 0)):
            items, before = listing(self._uri), self._followed
            followed = [name for name in items if name in (_METRICS, _OUTCOME) or name.endswith(f"/{MANIFEST}")]
            self._fetch(items, [name for name in followed if items[name] != before.get(name)])
            self._followed = items
            for name in _REQUESTS:
                if (self.run.path / name).exists():
                    upload(self.run.path / name, f"{self._uri}/{name}")

    def _upload(self) -> bool:
        """Upload what is new. Returns whether worker 0 waits for another node's part of a checkpoint."""
        if self._rank == 0:  # the metrics, with all that is known of a checkpoint, come before it
            upload(self.run.metrics, f"{self._uri}/{_METRICS}")
        manifests, stored = {}, listing(self._root)
        # Oldest first, so that the store grows in the order of the run.
        for folder in reversed(self._checkpoints.complete()):
            name, part = folder.path.name, f"{folder.path.name}/rank-{self._rank:05d}.json"
            with suppress(FileNotFoundError, CheckpointError):  # pruned in the meantime
                manifest = folder.manifest()
                if not {f"{name}/{MANIFEST}", part} & stored.keys():
                    for entry in chain(*manifest.files.values()):
                        upload(folder.path / entry.name, f"{self._root}/{name}/{entry.name}")
                    # Last: its presence means that the files before it are complete.
                    write(f"{self._root}/{part}", manifest.model_dump_json(indent=1))
                manifests[name] = manifest
        if self._rank == 0:
            for request in _REQUESTS:
                if listing(f"{self._uri}/{request}"):
                    (self.run.path / request).touch()
            if not all(self._complete(name, manifest) for name, manifest in manifests.items()):
                return True
            # Only older ones: another node may still be uploading its part of a later one.
            self._drop(lambda name: name not in manifests and name < max(manifests, default=""))
        self._upload_files()  # after the last checkpoint, so that the outcome follows it
        return False

    def _complete(self, name: str, manifest: Manifest) -> bool:
        """Write the manifest of a checkpoint at the URI if all parts are there. Returns whether they are."""
        stored = listing(f"{self._root}/{name}")
        if MANIFEST not in stored:
            parts = [
                Manifest.model_validate_json(read(f"{self._root}/{name}/{part}"))
                for part in stored
                if part.startswith("rank-")
            ]
            files = {rank: entries for part in parts for rank, entries in part.files.items()}
            if len(files) < manifest.world_size:
                return False
            whole = manifest.model_copy(update={"files": files}).sealed()
            write(f"{self._root}/{name}/{MANIFEST}", whole.model_dump_json(indent=1))
            self._completed(self._checkpoints.folder(manifest.position.step))  # like the rename on shared storage
        return True

    def _drop(self, is_dropped: Callable[[str], bool]) -> None:
        for name in filter(is_dropped, {name.partition("/")[0] for name in listing(self._root)}):
            remove(f"{self._root}/{name}/{MANIFEST}")  # first: without a manifest it is no checkpoint
            remove(f"{self._root}/{name}")

    def _upload_files(self, names: tuple[str, ...] = ("",)) -> None:
        began_s = time.time() - 1  # file times have a coarse resolution
        for path in sorted(self.run.path.rglob("*")):
            name = str(path.relative_to(self.run.path))
            stays = name.startswith((".", "checkpoints/", *_REQUESTS)) or "/." in name or not name.startswith(names)
            if not stays and path.is_file() and path.stat().st_mtime >= self._since_s and path.stat().st_size:
                upload(path, f"{self._uri}/{name}")
        if names == ("",):
            self._since_s = began_s

    def _fetch(self, items: Items, names: Iterable[str]) -> None:
        wanted = {name: items[name] for name in names if name in items}
        download(self._uri, wanted, self.run.path, afresh=True)
        for name in wanted:
            os.utime(self.run.path / name, (0, 0))  # marks it as unchanged, so that it is not uploaded
