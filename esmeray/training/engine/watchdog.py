"""A worker without progress ends itself, with the stacks of its threads saved, so that the launcher starts it again.

A thread in C (:mod:`faulthandler`) writes the stacks and the kernel's alarm ends the process: neither needs the GIL,
which what hangs may hold. Workers that wait for the hung one in a collective have no progress either and do the same,
so that the stacks of all are saved. A stopped worker (SIGSTOP) writes none: the others end, and it with them.
"""

import faulthandler
import signal
from pathlib import Path

LONGER = 5
"""Times the setting that the start, which compiles, a checkpoint and the export may take."""

GRACE_S = 5.0
"""From the stacks to the end of the process: workers whose last progress was somewhat later write theirs as well."""


class Watchdog:
    """The limit on the time without progress of this process; ``seconds`` None for no limit.

    The stacks go to the file of ``logs`` that :func:`left_stacks` looks for, which is there as long as the watchdog is.
    """

    def __init__(self, logs: Path, rank: int, seconds: float | None) -> None:
        self._path, self._seconds = logs / f"stacks-{rank}.txt", seconds
        self._has_stepped = False
        if seconds is not None:
            logs.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            self.extend()

    def progress(self) -> None:
        """Begin to wait anew, :data:`LONGER` before the first step is done."""
        self._wait(1 if self._has_stepped else LONGER)

    def stepped(self) -> None:
        self._has_stepped = True
        self.progress()

    def extend(self) -> None:
        """Begin to wait for what may take longer than a step."""
        self._wait(LONGER)

    def close(self) -> None:
        """Wait no more. May be called again."""
        if self._seconds is None:
            return
        self._seconds = None
        # Both before the file is closed, into which the thread in C would write.
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def _wait(self, times: int) -> None:
        if self._seconds is not None:
            # Later than the stacks, which take a moment. SIGALRM has no handler, so that it ends the process whatever
            # that does.
            signal.setitimer(signal.ITIMER_REAL, times * self._seconds + GRACE_S)
            faulthandler.dump_traceback_later(times * self._seconds, file=self._file)


def left_stacks(logs: Path) -> list[Path]:
    """The stacks of workers that a watchdog ended, unless they were set aside."""
    return [path for path in sorted(logs.glob("stacks-*.txt")) if path.stat().st_size]


def set_stacks_aside(logs: Path) -> Path | None:
    """Move stacks that are left to a folder of their own; returns it, None where there are none."""
    left = left_stacks(logs)
    if not left:
        return None
    # Each attempt's own: a later one's would overwrite them.
    folder = logs / f"hung-{1 + len([*logs.glob('hung-*')])}"
    folder.mkdir()
    for path in left:
        path.rename(folder / path.name)
    return folder
