"""A thread that does one thing at a time beside the main one, which may be interrupted at any point.

Ctrl-C raises KeyboardInterrupt in the main thread between any two calls, also within Python's own
``Condition.__enter__`` once its lock is taken: the thread of an executor, or one that :mod:`threading` is about to
start, then waits for that lock for ever, and the process for the thread (cpython issue 29988). Here the two share
nothing but queues written in C.
"""

import _thread
import queue
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Returned = TypeVar("_Returned")


class BackgroundThread(Generic[_Returned]):
    """One thread, one task at a time. To be closed."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], _Returned] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._started = False
        self._busy = False
        self._last: tuple[Any, BaseException | None] = (None, None)

    def begin(self, task: Callable[[], _Returned]) -> None:
        """Have ``task`` done, once the one before it is; raises what that one raised."""
        if self._started:
            self.wait()  # for the one before, whose failure must not be lost
        else:
            _thread.start_new_thread(_work, (self._tasks, self._outcomes, self._ended))
            self._started = True
        self._busy = True
        self._tasks.put(task)

    def wait(self) -> _Returned:
        """Return, or raise, what the last task did, once it is done."""
        if self._busy:  # the outcome is kept: a second wait gives, or raises, the same
            self._last = self._outcomes.get()
            self._busy = False
        value, error = self._last
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread, after the task that it is at."""
        if self._started:
            self._started = False  # before the waiting: when that is interrupted, nobody must wait again
            self._tasks.put(None)
            self._ended.get()


def _work(tasks: queue.SimpleQueue, outcomes: queue.SimpleQueue, ended: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        try:
            outcomes.put((task(), None))
        except BaseException as error:  # noqa: BLE001 - the other thread's to deal with
            outcomes.put((None, error))
        del task  # what it holds would stay until the next
    ended.put(None)  # no join: this thread has no object of threading's, whose locks an interrupt can break
