"""Ctrl-C and signals of clusters: report the signal, request a stop, wait for a grace period, then end in any case."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from esmeray.common.command_line import CLUSTER_SIGNALS

GRACE_S = 20.0
"""Grace period in seconds for workers to save and end."""

REPEAT_S = 2.0
"""Seconds within which a second signal counts as the same request: some tools signal a process, then its group."""

CLOSING_S = 6.0
"""Additional seconds for sinks to close. With Ray's shutdown, a run ends within 30 s."""


_INSISTENT = (signal.SIGINT, signal.SIGTERM)
"""If the first and the second signal are among these, the second one ends the run at once. Other second signals are not
a new request: the kernel repeats SIGXCPU every second, and batch systems send SIGTERM after SIGUSR1 or SIGUSR2."""


class StopSignals:
    """Handler of SIGINT and the signals of clusters, for a ``with`` block in the main thread.

    - Before :meth:`hand_over` there is nothing to save, and a signal raises KeyboardInterrupt, once per request. Ray's
      waits (2.60) pass on no other exception of a handler.
    - After it, the first signal calls ``on_request`` and starts the grace period. A second SIGINT or SIGTERM ends the
      grace period at once.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self.received: int | None = None
        self._raised: int | None = None  # the signal before the hand-over
        self._on_request: Callable[[], None] | None = None
        self._reply = "stopping"
        self._interrupts = False
        self._deadline = float("inf")
        self._asked_at = float("-inf")
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, *CLUSTER_SIGNALS):
                # Signals ignored by the parent stay ignored, e.g. SIGHUP under nohup. SIGINT does not, because shells
                # start background jobs with SIGINT ignored.
                if signum in _INSISTENT or signal.getsignal(signum) != signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def hand_over(self, on_request: Callable[[], None], reply: str, interrupts: bool = False) -> None:
        """From now on, the first signal calls ``on_request`` and prints the reply, instead of raising.

        With ``interrupts``, a later signal raises KeyboardInterrupt, which interrupts any wait of the main thread.
        """
        self._on_request = on_request
        self._reply = reply
        self._interrupts = interrupts

    @property
    def interrupted_code(self) -> int:
        """Exit code after a KeyboardInterrupt: 128 + the number of the signal that led to it."""
        return 128 + (self._raised or signal.SIGINT)

    def remaining_s(self, otherwise_s: float) -> float:
        """Seconds left for sinks to close after a signal, or ``otherwise_s`` without a signal."""
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
                return  # the first signal's exception is being handled: workers end and files are removed
            self._raised, self._asked_at = signum, now
            self._say()
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._asked_at = signum, now
            self._deadline = now + self._grace_s
            self._on_request()
            self._say()
        elif {signum, self.received} <= {*_INSISTENT} and now - self._asked_at > REPEAT_S:
            self._deadline = 0.0  # a repeated request ends the wait
            if self._interrupts:
                self._raised, self._asked_at = signum, now
                raise KeyboardInterrupt

    def _say(self) -> None:
        # Write to the descriptor: the signal may have interrupted print, which is not reentrant.
        with suppress(OSError):  # the reader may be gone: Ctrl-C also ends the other programs of a pipe
            os.write(2, f"\n{self._reply}\n".encode())
