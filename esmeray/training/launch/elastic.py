"""Attempts of a run on a cluster whose machines come and go, each with a number of workers that stays.

In: what starts an attempt, and what the cluster holds. Out: the error that ended the last attempt; how the run ended is
its outcome. Workers end an attempt after a checkpoint where the cluster asks for another number of them, and are lost
with their machines. Ray Train (2.60) would resize and replace them itself: to any number, whenever one machine comes,
and without asking for a checkpoint before.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from esmeray.cluster.placement import Capacity, Workers
from esmeray.cluster.section import RaySection
from esmeray.cluster.signals import StopSignals
from esmeray.common.command_line import say
from esmeray.common.errors import ResourceError
from esmeray.common.text import counted
from esmeray.run_folder.checkpoints import CheckpointStore, saved_steps
from esmeray.run_folder.paths import Outcome, RunFolder

LOOK_S = 2.0
"""Seconds between looks at the cluster."""
SETTLE_S = 6.0
"""Seconds in which a cluster counts as free what workers that ended held."""

Resized = dict[str, Any] | None
"""From and to which number of workers an attempt changed, and why."""


class Attempts:
    """The attempts of one run; ``look`` asks what the cluster holds."""

    def __init__(
        self,
        run: RunFolder,
        workers: Workers,
        look: Callable[[], Capacity],
        signals: StopSignals,
        section: RaySection,
    ) -> None:
        self._run, self._workers, self._look, self._signals = run, workers, look, signals
        self._checkpoints = CheckpointStore(run.checkpoints)
        self._max_failures, self._minimum_stay_s = section.max_failures, section.minimum_stay_s

    def train(self, start: Callable[[int, Resized], Any]) -> Exception | None:
        """Call ``start`` with a number of workers until the run ends; returns the error of the last attempt, if any."""
        before = 0
        why = ""
        failures = 0
        saved_step = -1  # less than that of a run without a checkpoint, whose first failure is one
        while count := self._awaited():
            resized = {"from": before, "to": count, "why": why} if before not in (0, count) else None
            before = count
            error, why = self._attempt(count, partial(start, count, resized))
            outcome = self._run.read_outcome()
            if outcome is not None and outcome.status != "resizing":
                if outcome.status == "failed":
                    self._checkpoints.sweep()  # of a run that ends here no half-written checkpoint is left
                return error
            if outcome is None:
                if error is None:
                    return None  # the time to save after a signal is over
                step, _ = saved_steps(self._run)
                # A run that got further may fail again: only failures without a new checkpoint add up.
                failures = failures + 1 if step <= saved_step else 1
                saved_step = step
                if failures > self._max_failures:
                    return error
                why = "workers failed"
                say(f"{why}, starting again from step {step} (their logs are in {self._run.logs}) ...")
        return None

    def _awaited(self) -> int:
        """The largest allowed number of workers once the cluster holds one; 0 where a signal came before."""
        since_s = time.monotonic()
        said = False
        while not self._signals.received:
            capacity = self._look()
            # What the last attempt's workers held is not free yet: a smaller number now would be a needless change.
            settled = time.monotonic() - since_s >= SETTLE_S
            if capacity.now and (settled or capacity.now == capacity.whole):
                return capacity.now
            if settled and not said:
                others = ", of which others use a part" if capacity.whole else ""
                least = counted(self._workers.allowed[0], "worker{s}")
                say(f"waiting for machines with {self._workers.each} for each of {least}: {capacity.machines}{others}")
                said = True
            time.sleep(LOOK_S / 4)
        # No worker is there to write it.
        step, saved = saved_steps(self._run)
        self._run.write_outcome(Outcome("stopped", step, f"stopped, {saved}", 0))
        return 0

    def _attempt(self, count: int, start: Callable[[], Any]) -> tuple[Exception | None, str]:
        """The error of an attempt, and why it was asked to end before the run does."""
        self._run.clear_requests()
        if self._signals.received:  # its request was cleared as well
            self._run.request_stop()
        need = Need(count, self._minimum_stay_s)
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(need, ended), name="cluster-watch", daemon=True).start()
        error = fit(start, self._signals)
        ended.set()
        return error, need.why

    def _watch(self, need: "Need", ended: threading.Event) -> None:
        """Look at the cluster every few seconds until the attempt has ended or has to end."""
        while not need.why and not ended.wait(LOOK_S):
            with suppress(ResourceError):  # the head node may be away; where it stays away, the attempt fails
                capacity = self._look()
                if not ended.is_set() and need.look(capacity, time.monotonic()):
                    self._run.request_resize()
                    say(f"{need.why}: saving a checkpoint, then the workers start anew")


class Need:
    """The need for another number of workers, or other machines. ``why``: its reason, empty while there is none."""

    def __init__(self, count: int, minimum_stay_s: float) -> None:
        self.why = ""
        self._count, self._minimum_stay_s = count, minimum_stay_s
        self._since_s: float | None = None  # more workers are possible

    def look(self, capacity: Capacity, now_s: float) -> bool:
        """Take what the cluster holds at a time into account; True where there is a need from now on."""
        if capacity.leaving:
            self.why = f"{' and '.join(capacity.leaving)} is about to be taken away"
        # Fewer is no need: if workers are lost, the attempt ends by itself.
        elif capacity.now <= self._count:
            self._since_s = None
        else:
            self._since_s = now_s if self._since_s is None else self._since_s
            if now_s - self._since_s >= self._minimum_stay_s:
                self.why = f"the cluster holds {counted(capacity.now, 'worker{s}')}"
        return bool(self.why)


def fit(train: Callable[[], Any], signals: StopSignals) -> Exception | None:
    """Run ``fit`` of a trainer or tuner of Ray to its end or that of the grace period after a signal.

    Returns its error. It runs in a thread: in the main thread Ray would install a signal handler of its own that aborts
    without saving.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            train()
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    # In the main thread, Ray Train (2.60) would install a SIGINT handler that aborts without saving.
    thread = threading.Thread(target=run, name="trainer-fit", daemon=True)
    thread.start()
    # In short turns, so that a signal is handled, which happens in this thread.
    while thread.is_alive() and not signals.expired:
        thread.join(0.2)
    return errors[0] if errors else None
