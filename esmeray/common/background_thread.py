"""A background thread that runs one task at a time, safe against interrupts of the main thread.

Ctrl-C raises KeyboardInterrupt in the main thread between any two calls, also within Python's own
``Condition.__enter__`` once its lock is taken: the thread of an executor, or one that :mod:`threading` is about to
start, then waits for that lock forever, and the process waits for the thread (cpython issue 29988). The two
threads here share only queues written in C.
"""

import _thread
import queue
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Returned = TypeVar("_Returned")


class BackgroundThread(Generic[_Returned]):
    """One thread that runs one task at a time. Call :meth:`close` at the end."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], _Returned] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._started = False
        self._busy = False
        self._last: tuple[Any, BaseException | None] = (None, None)

    def begin(self, task: Callable[[], _Returned]) -> None:
        """Start ``task`` after the previous one has ended; raise the previous task's error."""
        if self._started:
            self.wait()  # the previous task's failure must not be lost
        else:
            _thread.start_new_thread(_work, (self._tasks, self._outcomes, self._ended))
            self._started = True
        self._busy = True
        self._tasks.put(task)

    def wait(self) -> _Returned:
        """Wait for the last task; return its result or raise its error."""
        if self._busy:  # the outcome is kept: a second wait gives, or raises, the same
            self._last = self._outcomes.get()
            self._busy = False
        value, error = self._last
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread after its current task."""
        if self._started:
            self._started = False  # before the wait: if it is interrupted, a second close must not wait
            self._tasks.put(None)
            self._ended.get()


def _work(tasks: queue.SimpleQueue, outcomes: queue.SimpleQueue, ended: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        try:
            outcomes.put((task(), None))
        except BaseException as error:  # noqa: BLE001 - wait() raises it in the other thread
            outcomes.put((None, error))
        del task  # otherwise its objects would live until the next task
    ended.put(None)  # no join: this thread has no object of threading's, whose locks an interrupt can break
