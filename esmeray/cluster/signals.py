"""Ctrl-C and the signals of clusters: say so at once, ask once, wait a while, then end in any case."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from esmeray.common.command_line import CLUSTER_SIGNALS

GRACE_S = 20.0
"""Seconds that workers get to save and end."""

REPEAT_S = 2.0
"""A second signal within so many seconds is the same request: some tools signal a process and then its whole group."""

CLOSING_S = 6.0
"""Seconds that sinks get beyond that. With what Ray needs to shut down, a run ends within 30."""


_INSISTENT = (signal.SIGINT, signal.SIGTERM)
"""Signals whose second one ends at once. The kernel repeats SIGXCPU every second, and batch systems follow up on
SIGUSR1 or SIGUSR2 with SIGTERM."""


class StopSignals:
    """Handles SIGINT and the signals of clusters for the length of a ``with`` block in the main thread.

    Before :meth:`hand_over`, while nothing is running that would have to be saved, a signal raises KeyboardInterrupt,
    the same request once; Ray's waits (2.60) pass on nothing else that a handler raises. After it, the first one calls
    ``on_request`` and starts the grace period; a second SIGINT or SIGTERM ends that at once.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self.received: int | None = None
        self._raised: int | None = None  # before the hand-over
        self._on_request: Callable[[], None] | None = None
        self._reply = "stopping"
        self._interrupts = False
        self._deadline = float("inf")
        self._asked_at = float("-inf")
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, *CLUSTER_SIGNALS):
                # SIGHUP below nohup stays ignored. SIGINT does not: a shell's background jobs are begun so.
                if signum in _INSISTENT or signal.getsignal(signum) != signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def hand_over(self, on_request: Callable[[], None], reply: str, interrupts: bool = False) -> None:
        """Call ``on_request`` and print the reply for the first signal, instead of raising, from now on.

        With ``interrupts`` each later signal raises KeyboardInterrupt, which breaks off any wait of the main thread.
        """
        self._on_request = on_request
        self._reply = reply
        self._interrupts = interrupts

    def behind(self, error: KeyboardInterrupt | SystemExit) -> int | None:
        """The signal that led to this error before the hand-over; None where a program asked to exit."""
        return None if isinstance(error, SystemExit) else self._raised or signal.SIGINT

    def remaining_s(self, otherwise_s: float) -> float:
        """Seconds left for sinks to close after a signal; ``otherwise_s`` without one."""
        if self.received is None:
            return otherwise_s
        return max(1.0, self._deadline + CLOSING_S - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() > self._deadline

    @property
    def exit_code(self) -> int:
        """128 + signal number, the shell's convention; 0 without a signal."""
        return 128 + self.received if self.received else 0

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._on_request is None:
            if self._raised and (now - self._asked_at <= REPEAT_S or signum not in _INSISTENT):
                return  # the first one's exception is on its way through what ends workers and removes files
            self._raised, self._asked_at = signum, now
            self._say()
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._asked_at = signum, now
            self._deadline = now + self._grace_s
            self._on_request()
            self._say()
        elif {signum, self.received} <= {*_INSISTENT} and now - self._asked_at > REPEAT_S:
            self._deadline = 0.0  # whoever asks again does not want to wait
            if self._interrupts:
                self._raised, self._asked_at = signum, now
                raise KeyboardInterrupt

    def _say(self) -> None:
        # To the descriptor: the signal may have interrupted a print, which must not be entered twice.
        with suppress(OSError):  # nobody may read it any more: Ctrl-C also ends what a pipe leads to
            os.write(2, f"\n{self._reply}\n".encode())
