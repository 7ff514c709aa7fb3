"""Attempts of a run on a cluster whose machines come and go. The number of workers is fixed within an attempt.

:class:`Attempts` starts attempts and watches the cluster. Its result is the error that ended the last attempt; the
outcome file records how the run ended. If the cluster calls for a different number of workers, the workers save a
checkpoint and end the attempt. They are lost if their machines are. Ray Train (2.60) could resize and replace workers
itself, but to any number, whenever a machine joins, and without a checkpoint first.
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
"""Seconds between queries of the cluster."""
SETTLE_S = 6.0
"""Seconds until a cluster reports the resources of ended workers as free."""

Resized = dict[str, Any] | None
"""Change in the number of workers of an attempt: old number, new number and reason. None if unchanged."""


class Attempts:
    """The attempts of one run. ``look`` returns the capacity of the cluster."""

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
        """Call ``start`` with a number of workers until the run ends. Returns the error of the last attempt, if any."""
        before = 0
        why = ""
        failures = 0
        saved_step = -1  # below step 0, so that the first failure of a run without a checkpoint counts as one
        while count := self._awaited():
            resized = {"from": before, "to": count, "why": why} if before not in (0, count) else None
            before = count
            error, why = self._attempt(count, partial(start, count, resized))
            outcome = self._run.read_outcome()
            if outcome is not None and outcome.status != "resizing":
                if outcome.status == "failed":
                    self._checkpoints.sweep()  # leave no half-written checkpoint behind
                return error
            if outcome is None:
                if error is None:
                    return None  # the time to save after a signal is over
                step, _ = saved_steps(self._run)
                # Progress resets the count: only consecutive failures without a new checkpoint count.
                failures = failures + 1 if step <= saved_step else 1
                saved_step = step
                if failures > self._max_failures:
                    return error
                why = "workers failed"  # also for the `resized` event of the next attempt
                say(f"{why}, restarting from step {step} (worker logs: {self._run.logs}) ...")
        return None

    def _awaited(self) -> int:
        """Wait until the cluster can hold an allowed number of workers; return the largest such number, 0 after a
        signal."""
        since_s = time.monotonic()
        announced = False
        while not self._signals.received:
            capacity = self._look()
            # The last attempt's resources are not free yet: settling for fewer workers now would be a needless change.
            settled = time.monotonic() - since_s >= SETTLE_S
            if capacity.now and (settled or capacity.now == capacity.whole):
                return capacity.now
            if settled and not announced:
                others = ", partly in use by others" if capacity.whole else ""
                least = counted(self._workers.allowed[0], "worker{s}")
                say(f"waiting for {self._workers.per_worker} for each of {least}: {capacity.machines}{others}")
                announced = True
            time.sleep(LOOK_S / 4)
        # No worker exists to write the outcome.
        step, saved = saved_steps(self._run)
        self._run.write_outcome(Outcome("stopped", step, f"stopped, {saved}", 0))
        return 0

    def _attempt(self, count: int, start: Callable[[], Any]) -> tuple[Exception | None, str]:
        """Run one attempt. Returns its error, and the reason if it was asked to end before the run does."""
        self._run.clear_requests()
        if self._signals.received:  # clear_requests removed its request as well
            self._run.stop_request.touch()
        need = Need(count, self._minimum_stay_s)
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(need, ended), name="cluster-watch", daemon=True).start()
        error = fit(start, self._signals)
        ended.set()
        return error, need.why

    def _watch(self, need: "Need", ended: threading.Event) -> None:
        """Query the cluster every few seconds until the attempt has ended or must end."""
        while not need.why and not ended.wait(LOOK_S):
            with suppress(ResourceError):  # the head node may be away for a while; if it stays away, the attempt fails
                capacity = self._look()
                if not ended.is_set() and need.look(capacity, time.monotonic()):
                    self._run.resize_request.touch()
                    say(f"{need.why}: saving a checkpoint, then the workers restart")


class Need:
    """Decision whether the cluster calls for other workers. ``why``: the reason, empty as long as there is none."""

    def __init__(self, count: int, minimum_stay_s: float) -> None:
        self.why = ""
        self._count, self._minimum_stay_s = count, minimum_stay_s
        self._since_s: float | None = None  # time since which more workers are possible

    def look(self, capacity: Capacity, now_s: float) -> bool:
        """Update the decision with the cluster's capacity at a time; return True if the attempt should end."""
        if capacity.leaving:
            self.why = f"{' and '.join(capacity.leaving)} is about to be preempted"
        # Fewer workers need no action: if workers are lost, the attempt ends by itself.
        elif capacity.now <= self._count:
            self._since_s = None
        else:
            self._since_s = now_s if self._since_s is None else self._since_s
            if now_s - self._since_s >= self._minimum_stay_s:
                self.why = f"the cluster now has room for {counted(capacity.now, 'worker{s}')}"
        return bool(self.why)


def fit(train: Callable[[], Any], signals: StopSignals) -> Exception | None:
    """Run ``fit`` of a Ray trainer or tuner until it ends, or until the grace period after a signal is over.

    Returns its error. It runs in a thread: in the main thread Ray would install its own signal handler, which aborts
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
    # Join in short intervals: signals are handled in this thread.
    while thread.is_alive() and not signals.expired:
        thread.join(0.2)
    return errors[0] if errors else None
