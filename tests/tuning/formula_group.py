"""Workers that answer from a formula, without torch: a trial's process starts in a second."""

import time

from esmeray.cluster.placement import Workers
from esmeray.common.errors import ResourceError
from esmeray.tuning.records import Job, Measurement, Settings, StoppedError

STATUSES = {(512, 0): "out_of_memory", (512, 1): "crash", (128, 1): "nan", (64, 1): "timeout"}
"""Answers of the group below for some budgets and loader processes."""


class FormulaGroup:
    """Stands in for :class:`~esmeray.tuning.workers.WorkerGroup`: the middle budget is the fastest."""

    def __init__(self, workers: Workers, job: Job, delay_s: float = 0.0, failing: bool = True) -> None:
        self.job = job
        self.delay_s = delay_s
        self.statuses = STATUSES if failing else {}

    def measure(self, settings: Settings, to_beat: float | None) -> Measurement:
        deadline = time.monotonic() + self.delay_s
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if self.job.folder.stop_requested():
                raise StoppedError
        status = self.statuses.get((settings.tokens, settings.num_workers))
        if status is not None:
            return Measurement(status, f"injected {status}", seconds=1.0)
        speed = 1000.0 + settings.tokens + 100 * settings.num_workers
        shares = {"data_wait": 0.2 if settings.num_workers == 0 else 0.01}
        return Measurement("ok", "", speed, [speed, speed], settings.tokens * 1000, 10**6, shares, seconds=1.0)

    def close(self) -> None:
        pass


class FailingGroup(FormulaGroup):
    """Everything is too large for it."""

    def measure(self, *_: object) -> Measurement:
        return Measurement("out_of_memory", "out of memory", seconds=1.0)


class RefusingGroup(FormulaGroup):
    """It does not start."""

    def __init__(self, *_: object) -> None:
        raise ResourceError("the workers that measure did not start: no room")
