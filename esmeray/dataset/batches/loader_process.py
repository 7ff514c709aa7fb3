"""Process that prepares batches for a training worker, and the worker's handle to it.

It is a separate program. Forking a worker with threads or an open store is unsafe, and a multiprocessing child would
first import the worker's main module, which is Ray's. For residues it imports neither torch nor Ray, and starts in a
fraction of a second with a few tens of megabytes. Otherwise it imports torch: 2 s and 200 MB.

Pickled requests arrive on stdin, and replies go to stdout in the same order. The process ends when stdin is closed,
which the kernel does even if the worker is killed. Only the worker handles Ctrl-C.
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
"""Maximum that glibc allows to keep (DEFAULT_MMAP_THRESHOLD_MAX); a batch of 64 ki tokens takes 2 MiB."""

_PARENT_POLL_S = 1.0
_END_TIMEOUT_S = 5.0


class LoaderProcessLost(errors.ResourceError):
    """A loader process ended or was killed."""

    retryable = True


class LoaderProcess:
    """Worker's handle to the process: send requests, receive prepared batches in the same order."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        """Start the process. It unpickles ``prepare``, which opens its own stores."""
        with kept_from_children():
            self._process = subprocess.Popen(
                # -P: a module in the user's working folder must not shadow a Python module.
                [sys.executable, "-P", "-m", "esmeray.dataset.batches.loader_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                process_group=0,  # so that Ctrl-C at the terminal reaches only the worker, from the start
            )
        # Prepared batches or exceptions; None at the end.
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon thread, because it blocks on the pipe as long as the process lives.
        threading.Thread(target=_collect, args=(self._process.stdout, self.replies), daemon=True).start()
        # A finalizer, for workers that end by an exception or drop the loader without closing it.
        self.close = weakref.finalize(self, _end_process, self._process)
        self.pid = self._process.pid
        self.request(os.getpid(), prepare)

    def request(self, *request: Any) -> None:
        """Request a batch: epoch, records and, optionally, step. Raises LoaderProcessLost if the process has ended."""
        assert self._process.stdin is not None
        try:
            _send(request, self._process.stdin)
        except BrokenPipeError as error:
            raise self._lost() from error

    def reply(self) -> Any:
        """Wait for the oldest requested batch.

        Raises the EsmerayError that the process raised; RuntimeError with the traceback of any other exception there;
        LoaderProcessLost if the process has ended.
        """
        reply = self.replies.get()
        if reply is None:
            self.replies.put(None)  # keep it for later calls
            raise self._lost()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _lost(self) -> LoaderProcessLost:
        # The pipe breaks shortly before the kernel has the exit code.
        try:
            code: int | None = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        hint = "; if it ran into the memory limit, lower data.num_workers" if code == -signal.SIGKILL else ""
        return LoaderProcessLost(f"loader process {self.pid} {how}{hint}")


def _environment() -> dict[str, str]:
    """Return the environment of the process.

    It has the worker's module search path, and one thread for NumPy, which gains nothing from more. glibc keeps freed
    memory for the next batch, because new pages would cost more time than masking.
    """
    paths = [path or str(Path.cwd()) for path in sys.path]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    keeping = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(_KEPT_BYTES))
    return {**os.environ, **one_thread, **keeping, "PYTHONPATH": os.pathsep.join(paths)}


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, which only reads and has nothing to finish."""
    process.kill()
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the buffer may still hold a request
        process.stdin.close()


def _collect(stream: IO[bytes], replies: queue.SimpleQueue[Any]) -> None:
    """Move replies into the queue as they arrive, so that the process never waits for the worker; None at the end."""
    try:
        with stream, contextlib.suppress(EOFError, pickle.UnpicklingError):  # UnpicklingError if a reply was cut off
            while True:
                replies.put(_receive(stream))
    finally:
        replies.put(None)


def _send(message: object, stream: IO[bytes]) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _receive(stream: IO[bytes]):
    return pickle.load(stream)  # noqa: S301 - only a worker and the process that it started use the pipe


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # send prints to stderr, so that they don't mix with the replies
    try:
        parent, prepare = _receive(requests)
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        # Strictly in order, because the worker matches replies to requests by order.
        while True:
            _send(_answer(prepare, _receive(requests)), replies)
    except (EOFError, pickle.UnpicklingError, BrokenPipeError):
        os._exit(0)  # the worker has ended, so there is nothing to flush to


def _answer(prepare: Callable[..., Any], request: tuple[Any, ...]) -> Any:
    try:
        return prepare(*request)
    except errors.EsmerayError as error:
        return error
    except Exception:  # noqa: BLE001 - raised in the worker; a dead process would look like a machine fault
        return RuntimeError(f"in a loader process:\n{traceback.format_exc()}")


def _exit_with_parent(parent: int) -> None:
    """Exit after the worker, even if another of its processes keeps the write end of stdin open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()
