"""Workers that answer from a formula, without torch: a trial's process starts in a second."""

import time

from esmeray.cluster.placement import Workers
from esmeray.tuning.records import StoppedError
from esmeray.tuning.settings import Measurement

STATUSES = {(512, 0): "out_of_memory", (512, 1): "crash", (128, 1): "nan", (64, 1): "timeout"}
"""Answers of the group below for some budgets and loader processes."""


class FormulaGroup:
    """Stands in for :class:`~esmeray.tuning.workers.WorkerGroup`: the middle budget is the fastest."""

    def __init__(self, workers: Workers, delay_s: float = 0.0, failing: bool = True) -> None:
        self.delay_s, self.statuses = delay_s, STATUSES if failing else {}

    def measure(self, config, search, to_beat, stopped) -> Measurement:
        deadline = time.monotonic() + self.delay_s
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if stopped():
                raise StoppedError
        tokens, num_workers = config.batch.tokens, config.data.num_workers
        if (status := self.statuses.get((tokens, num_workers))) is not None:
            return Measurement(status, f"injected {status}", seconds=1.0)
        speed = 1000.0 + tokens + 100 * num_workers
        shares = {"data_wait": 0.2 if num_workers == 0 else 0.01}
        return Measurement("ok", "", speed, [speed, speed], tokens * 1000, 10**6, shares, seconds=1.0)

    def close(self) -> None:
        pass


class FailingGroup(FormulaGroup):
    """Everything is too large for it."""

    def measure(self, *_: object) -> Measurement:
        return Measurement("out_of_memory", "out of memory", seconds=1.0)
