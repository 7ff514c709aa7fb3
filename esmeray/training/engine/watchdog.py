"""End a worker that makes no progress, after saving the stacks of its threads, so that the launcher restarts it.

A thread in C (:mod:`faulthandler`) writes the stacks and the kernel's alarm ends the process. Neither needs the GIL,
which the hanging code may hold. Workers that wait for the hanging one in a collective make no progress either and do
the same, so the stacks of all workers are saved. A stopped worker (SIGSTOP) writes none; it ends when the others end.
"""

import faulthandler
import signal
from pathlib import Path

LONGER = 5
"""Factor on the limit for the start, which compiles, for a checkpoint and for the export."""

GRACE_S = 5.0
"""Seconds from writing the stacks to the end of the process, so that workers whose last progress was later write
theirs."""


class Watchdog:
    """Limit on the time without progress of this process. ``seconds`` None: no limit.

    The stacks are written to a file in ``logs``, which exists as long as the watchdog does. :func:`left_stacks` finds
    it.
    """

    def __init__(self, logs: Path, rank: int, seconds: float | None) -> None:
        self._path, self._seconds = logs / f"stacks-{rank}.txt", seconds
        self._has_stepped = False
        if seconds is not None:
            logs.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            self.extend()

    def progress(self) -> None:
        """Restart the timer; before the first step is done the limit is :data:`LONGER` times as long."""
        self._wait(1 if self._has_stepped else LONGER)

    def stepped(self) -> None:
        self._has_stepped = True
        self.progress()

    def extend(self) -> None:
        """Restart the timer for work that may take longer than a step."""
        self._wait(LONGER)

    def close(self) -> None:
        """Stop the timer. May be called again."""
        if self._seconds is None:
            return
        self._seconds = None
        # Cancel both before the file is closed, since the C thread writes to it.
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def _wait(self, times: int) -> None:
        if self._seconds is not None:
            # The alarm comes after the stacks, which take a moment to write. SIGALRM has no handler, so the kernel ends
            # the process whatever it is doing.
            signal.setitimer(signal.ITIMER_REAL, times * self._seconds + GRACE_S)
            faulthandler.dump_traceback_later(times * self._seconds, file=self._file)


def left_stacks(logs: Path) -> list[Path]:
    """Stack files of workers that a watchdog ended, without those set aside."""
    return [path for path in sorted(logs.glob("stacks-*.txt")) if path.stat().st_size]


def set_stacks_aside(logs: Path) -> Path | None:
    """Move left-over stack files to a folder of their own. Returns the folder, or None if there are no files."""
    left = left_stacks(logs)
    if not left:
        return None
    # One folder per attempt: a later attempt would overwrite the files.
    folder = logs / f"hung-{1 + len([*logs.glob('hung-*')])}"
    folder.mkdir()
    for path in left:
        path.rename(folder / path.name)
    return folder
