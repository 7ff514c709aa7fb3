"""A process that prepares batches for a training worker, and the worker's end of the line to it.

The process is a program of its own, not a fork and no multiprocessing child: a
fork of a worker that runs threads or has a store open is unsafe, and a multiprocessing child would first import the
worker's main module, which is Ray's. It imports neither torch nor Ray, so it is ready within a fraction of a second
in a few tens of megabytes.

It reads requests from stdin and writes replies, in the same order, to stdout: plain binary frames, no pickle. It ends
when stdin does, which the kernel sees to even when the worker is killed. Ctrl-C is the worker's to handle.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common import errors
from dataset.batches.masking import MaskingShares
from dataset.batches.preparation import PreparationSettings, PreparedBatch, prepare_batch
from dataset.store.reader import Store

_REQUEST = struct.Struct("<qI")
"""Epoch and N; N int64 record indices follow."""

_REPLY = struct.Struct("<?II")
"""True, N and T: T tokens, T targets and N+1 int32 offsets follow. False, 0 and a size: a failure as JSON follows."""

_KEPT_BYTES = 32 << 20
"""The most that glibc allows to be kept (DEFAULT_MMAP_THRESHOLD_MAX); a batch of 64 ki tokens takes 2 MiB."""

_PARENT_POLL_S = 1.0
_END_TIMEOUT_S = 5.0

_Reply: TypeAlias = "PreparedBatch | Exception | None"


class LoaderProcessLost(errors.ResourceError):
    """A loader process ended by itself, or was killed."""

    retryable = True


class LoaderProcess:
    """The worker's end: hand in requests, take prepared batches in the same order."""

    def __init__(self, store_path: Path | str, settings: PreparationSettings) -> None:
        """Start the process; it opens the store by itself."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dataset.batches.loader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            process_group=0,  # Ctrl-C at the terminal goes to the worker alone, from the first moment on
        )
        self._replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(self._process.stdout, self._replies), daemon=True).start()
        self._end = weakref.finalize(self, _end_process, self._process)
        start = {"parent": os.getpid(), "store": str(store_path), "settings": asdict(settings)}
        self._write(json.dumps(start).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def replies_waiting(self) -> int:
        """Replies that are here and not taken yet."""
        return self._replies.qsize()

    def request(self, epoch: int, records_N: NDArray[np.int64]) -> None:
        """Ask for a batch of these records.

        Raises:
            LoaderProcessLost: the process is gone.
        """
        self._write(_REQUEST.pack(epoch, records_N.size) + records_N.astype("<i8").tobytes())

    def reply(self) -> PreparedBatch:
        """Wait for the batch that was asked for longest ago.

        Raises:
            EsmerayError: what the process raised, with its message.
            RuntimeError: a fault of the program in the process, with its traceback.
            LoaderProcessLost: the process is gone.
        """
        reply = self._next_reply()
        if reply is None:
            raise self._lost()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def discard(self) -> None:
        """Wait for a reply that nobody wants any more, whatever it is."""
        self._next_reply()

    def close(self) -> None:
        """End the process and wait for its end."""
        self._end()

    def _next_reply(self) -> _Reply:
        reply = self._replies.get()
        if reply is None:
            self._replies.put(None)  # stays the last word for whoever asks next
        return reply

    def _write(self, frame: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(frame)
            stdin.flush()
        except BrokenPipeError as error:
            raise self._lost() from error

    def _lost(self) -> LoaderProcessLost:
        try:
            code: int | None = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        hint = "; out of memory? then lower data.num_workers" if code == -signal.SIGKILL else ""
        return LoaderProcessLost(f"loader process {self.pid} {how}{hint}")


def _environment() -> dict[str, str]:
    """The worker's own module search path, one thread for NumPy, which has nothing to compute with more, and memory
    that glibc keeps for the next batch: given back after each, its pages come anew, which costs more than masking."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    keeping = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(_KEPT_BYTES))
    return {**os.environ, **one_thread, **keeping, "PYTHONPATH": os.pathsep.join(paths)}


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill it: it only reads, so there is nothing that it would have to finish."""
    process.kill()
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a request may still stand in the buffer
        process.stdin.close()


def _collect(stream: BinaryIO, replies: queue.SimpleQueue[_Reply]) -> None:
    """Move replies into the queue as they come, so that the process never waits for the worker; None at the end."""
    try:
        with stream:
            while (header := _read_exactly(stream, _REPLY.size)) is not None:
                reply = _read_reply(stream, *_REPLY.unpack(header))
                if reply is None:
                    break
                replies.put(reply)
    finally:
        replies.put(None)


def _read_reply(stream: BinaryIO, succeeded: bool, num_sequences: int, size: int) -> _Reply:
    payload = _read_exactly(stream, 2 * size + 4 * (num_sequences + 1) if succeeded else size)
    if payload is None:
        return None
    if not succeeded:
        return _failure(**json.loads(payload))
    both_T = np.frombuffer(payload, dtype=np.uint8, count=2 * size)
    cu_seqlens = np.frombuffer(payload, dtype="<i4", offset=2 * size)
    return PreparedBatch(tokens=both_T[:size], targets=both_T[size:], cu_seqlens=cu_seqlens)


def _failure(kind: str, message: str) -> Exception:
    """The refusal that the process raised, as the same class; a fault of the program as a RuntimeError."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.EsmerayError):
        return known(message)
    return RuntimeError(f"in a loader process:\n{message}")


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    """``size`` bytes, or None where the stream ends before."""
    data = stream.read(size)
    return data if len(data) == size else None


def main() -> None:
    """The process: one reply for each request, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get between the frames
    start = json.loads(requests.readline() or b"null")
    if start is None:
        return
    threading.Thread(target=_exit_with_parent, args=(start["parent"],), daemon=True).start()
    settings = _settings(**start["settings"])
    store: Store | None = None
    for epoch, records_N in _read_requests(requests):
        try:
            store = store or Store(start["store"])
            prepared = prepare_batch(store, settings, epoch, records_N)
            frames = _success_frames(prepared)
        except errors.EsmerayError as error:
            frames = _failure_frames(_kind(error), str(error))
        except Exception:  # noqa: BLE001 (told to the worker, which raises it: a dead process would look like a fault of the machine)
            frames = _failure_frames("Exception", traceback.format_exc())
        try:
            replies.writelines(frames)
            replies.flush()
        except BrokenPipeError:
            os._exit(1)  # the worker is gone; nothing is left to flush to


def _settings(masking: dict[str, float] | None, **others: int) -> PreparationSettings:
    return PreparationSettings(masking=MaskingShares(**masking) if masking else None, **others)  # type: ignore[arg-type]


def _read_requests(stream: BinaryIO) -> Iterator[tuple[int, NDArray[np.int64]]]:
    while (header := _read_exactly(stream, _REQUEST.size)) is not None:
        epoch, num_sequences = _REQUEST.unpack(header)
        payload = _read_exactly(stream, 8 * num_sequences)
        if payload is None:
            return
        yield epoch, np.frombuffer(payload, dtype="<i8")


def _success_frames(prepared: PreparedBatch) -> list[bytes]:
    header = _REPLY.pack(True, prepared.cu_seqlens.size - 1, prepared.tokens.size)
    return [header, prepared.tokens.tobytes(), prepared.targets.tobytes(), prepared.cu_seqlens.astype("<i4").tobytes()]


def _failure_frames(kind: str, message: str) -> list[bytes]:
    payload = json.dumps({"kind": kind, "message": message}).encode()
    return [_REPLY.pack(False, 0, len(payload)), payload]


def _kind(error: errors.EsmerayError) -> str:
    """Name of the nearest class that :mod:`common.errors` defines."""
    return next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)


def _exit_with_parent(parent: int) -> None:
    """End when the worker has, even where some other process of its holds the write end of stdin open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()
