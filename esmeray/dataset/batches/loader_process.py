"""A process that prepares batches for a training worker, and the worker's end of the line to it.

The process is a program of its own: a fork of a worker that runs threads or has a store open is unsafe, and a
multiprocessing child would first import the worker's main module, which is Ray's. For residues it imports neither torch
nor Ray and is ready in a fraction of a second and a few tens of megabytes; otherwise torch, 2 s and 200 MB. Requests
come pickled by stdin, replies go in the same order by stdout. It ends when stdin does, which the kernel sees to even
when the worker is killed. Ctrl-C is the worker's to handle.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from esmeray.common import errors
from esmeray.common.command_line import kept_from_children

_KEPT_BYTES = 32 << 20
"""The most that glibc allows to be kept (DEFAULT_MMAP_THRESHOLD_MAX); a batch of 64 ki tokens takes 2 MiB."""

_PARENT_POLL_S = 1.0
_END_TIMEOUT_S = 5.0


class LoaderProcessLost(errors.ResourceError):
    """A loader process ended or was killed."""

    retryable = True


class LoaderProcess:
    """The worker's end: hand in requests, take prepared batches in the same order."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        """Start the process; it unpickles ``prepare``, which opens its own stores."""
        with kept_from_children():
            self._process = subprocess.Popen(
                # -P: a module of the user's working folder must not hide one of Python's.
                [sys.executable, "-P", "-m", "esmeray.dataset.batches.loader_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                process_group=0,  # Ctrl-C at the terminal goes to the worker alone, from the first moment on
            )
        # What was prepared, or an exception; None at the end.
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon, as it waits on the pipe for as long as the process lives.
        threading.Thread(target=_collect, args=(self._process.stdout, self.replies), daemon=True).start()
        # Also where nobody closes it: a worker that ends by an exception, or drops the loader.
        self.close = weakref.finalize(self, _end_process, self._process)
        self.pid = self._process.pid
        self.request(os.getpid(), prepare)

    def request(self, *request: Any) -> None:
        """Ask for a batch: epoch, records and perhaps step. Raises LoaderProcessLost where the process is gone."""
        assert self._process.stdin is not None
        try:
            _send(request, self._process.stdin)
        except BrokenPipeError as error:
            raise self._lost() from error

    def reply(self) -> Any:
        """Wait for the batch that was asked for longest ago.

        Raises the EsmerayError that the process raised, RuntimeError with the traceback of a fault of the program
        there, LoaderProcessLost where the process is gone.
        """
        reply = self.next_reply()
        if reply is None:
            raise self._lost()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def next_reply(self) -> Any:
        """Wait for a reply, whatever it is: an exception, or None where the process is gone."""
        reply = self.replies.get()
        if reply is None:
            self.replies.put(None)  # stays the last word for whoever asks next
        return reply

    def _lost(self) -> LoaderProcessLost:
        # The pipe breaks a moment before the kernel has an exit code to say why.
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


def _collect(stream: IO[bytes], replies: queue.SimpleQueue[Any]) -> None:
    """Move replies into the queue as they come, so that the process never waits for the worker; None at the end."""
    try:
        with stream, contextlib.suppress(EOFError, pickle.UnpicklingError):  # the second where a reply was cut
            while True:
                replies.put(_receive(stream))
    finally:
        replies.put(None)


def _send(message: object, stream: IO[bytes]) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _receive(stream: IO[bytes]):
    return pickle.load(stream)  # noqa: S301 - between a worker and the process that it started, over their own pipe


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get between the replies
    try:
        parent, prepare = _receive(requests)
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        # One after the other and in order, which is what the worker matches replies with requests by.
        while True:
            _send(_answer(prepare, _receive(requests)), replies)
    except (EOFError, pickle.UnpicklingError, BrokenPipeError):
        os._exit(0)  # the worker is gone; nothing is left to flush to


def _answer(prepare: Callable[..., Any], request: tuple[Any, ...]) -> Any:
    try:
        return prepare(*request)
    except errors.EsmerayError as error:
        return error
    except Exception:  # noqa: BLE001 - for the worker to raise: a dead process would look like a fault of the machine
        return RuntimeError(f"in a loader process:\n{traceback.format_exc()}")


def _exit_with_parent(parent: int) -> None:
    """End when the worker has, even where some other process of its holds the write end of stdin open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()
