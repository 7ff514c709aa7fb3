"""All processes of one program, stopped and continued together.

In: a program that is started with :meth:`ProcessFamily.variables` in its environment. Out: its processes, whoever
started them and whenever. They are found by that variable, which children inherit, and by descent: what sets its own
title, as some of Ray's processes do, overwrites the environment that others can read. What was found once stays known,
also when its parent is gone.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping

import psutil

MARK = "ESMERAY_BENCHMARK_PROGRAM"
"""Environment variable by which a program's processes are found."""
_KILL_S = 10.0
_POLL_S = 0.05
_GONE = (psutil.Error, OSError)
"""It ended meanwhile, is a zombie, or another user's."""


class ProcessFamily:
    """The processes of one program."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._members: set[psutil.Process] = set()

    @property
    def variables(self) -> Mapping[str, str]:
        """What the program's environment must hold."""
        return {MARK: self._name}

    def living(self) -> set[psutil.Process]:
        """Those that are there now."""
        processes = list(psutil.process_iter())
        known = self._members & set(processes)
        found = known | {process for process in processes if process not in known and self._is_marked(process)}
        self._members = found | _descendants(found, processes)
        return set(self._members)

    def stop(self) -> None:
        """Stop them all, also those that are started while others are being stopped."""
        stopped: set[psutil.Process] = set()
        while new := self.living() - stopped:
            _signal(new, "suspend")
            stopped |= new

    def go_on(self) -> None:
        """Continue those that were stopped: a stopped process starts no other, so all are known."""
        _signal(self._members, "resume")

    def thread_times_s(self) -> dict[int, float]:
        """CPU seconds of every thread that is there. What ended between two calls is missing from the second."""
        times: dict[int, float] = {}
        for process in self.living():
            try:
                threads = process.threads()
            except _GONE:
                continue
            times |= {thread.id: thread.user_time + thread.system_time for thread in threads}
        return times

    def ask_to_end(self, program: subprocess.Popen[str]) -> None:
        """Continue all and tell the program, once, to end."""
        self.living()
        self.go_on()
        program.terminate()

    def end(self, program: subprocess.Popen[str], patience_s: float) -> None:
        """Wait until the program has ended, at most ``patience_s``, and kill whatever is left then."""
        try:
            program.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also where this is interrupted
            program.kill()
            program.wait()
            deadline = time.monotonic() + _KILL_S
            while (left := self.living()) and time.monotonic() < deadline:
                _signal(left, "kill")
                time.sleep(_POLL_S)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._name
        except _GONE:
            return False


def _descendants(ancestors: set[psutil.Process], processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    children = defaultdict(list)
    for process in processes:
        try:
            children[process.ppid()].append(process)
        except _GONE:
            continue
    found: set[psutil.Process] = set()
    pending = list(ancestors)
    while pending:
        for child in children[pending.pop().pid]:
            if child not in ancestors and child not in found:
                found.add(child)
                pending.append(child)
    return found


def _signal(processes: Iterable[psutil.Process], name: str) -> None:
    """Call ``suspend``, ``resume`` or ``kill`` of each that is still there."""
    for process in processes:
        try:
            getattr(process, name)()
        except _GONE:
            continue
