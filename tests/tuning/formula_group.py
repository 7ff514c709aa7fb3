"""Simulated workers that compute measurements from a formula, without torch: a trial's process starts in a second.

``python -m tests.tuning.formula_group FOLDER`` runs a search on the current cluster with two simulated GPUs.
"""

import functools
import os
import sys
import time
from pathlib import Path

from esmeray.cluster.placement import Workers
from esmeray.common.errors import ResourceError
from esmeray.tuning.records import Job, Measurement, Settings, StoppedError

STATUSES = {(512, 0): "out_of_memory", (512, 1): "crash", (128, 1): "nan", (64, 1): "timeout"}
"""Statuses that FormulaGroup reports, by token budget and number of loader processes."""


class FormulaGroup:
    """Substitute for :class:`~esmeray.tuning.workers.WorkerGroup`: the middle budget is the fastest."""

    def __init__(self, workers: Workers, job: Job, delay_s: float = 0.0, failing: bool = True) -> None:
        self.job = job
        self.delay_s = delay_s
        self.statuses = STATUSES if failing else {}

    def measure(self, settings: Settings) -> Measurement:
        deadline = time.monotonic() + self.delay_s
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if self.job.folder.stop_request.exists():
                raise StoppedError
        status = self.statuses.get((settings.tokens, settings.num_workers))
        if status is not None:
            return Measurement(status, f"injected {status}", seconds=1.0)
        speed = 1000.0 + settings.tokens + 100 * settings.num_workers
        shares = {"data_wait": 0.2 if settings.num_workers == 0 else 0.01}
        return Measurement("ok", "", speed, settings.tokens * 1000, 10**6, shares, seconds=1.0)

    def close(self) -> None:
        pass


class RefusingGroup(FormulaGroup):
    """A group that does not start."""

    def __init__(self, *_: object) -> None:
        raise ResourceError("the measuring workers did not start: no room")


DEVICES, TRIALS, PATIENCE_S = 2, 6, 120.0


class MeetingGroup(FormulaGroup):
    """A group that starts measuring once there is a process with a trial for each device."""

    def measure(self, *arguments):
        meeting = self.job.folder.path.parent / "meeting"
        meeting.mkdir(exist_ok=True)
        (meeting / str(os.getpid())).touch()
        deadline = time.monotonic() + PATIENCE_S
        while len([*meeting.iterdir()]) < DEVICES:
            assert time.monotonic() < deadline, "trials do not run side by side"
            time.sleep(0.05)
        return super().measure(*arguments)


def main(folder: Path) -> int:
    from esmeray.tuning.run import tune
    from esmeray.tuning.section import TuneConfig
    from tests.runs import tiny_config

    space = {"tokens": [64, 128, 256, 512], "num_workers": [1, 2], "precision": ["fp32"]}
    search = TuneConfig.model_validate({"name": "fast", "space": space, "search": {"max_trials": TRIALS}})
    group = functools.partial(MeetingGroup, delay_s=0.1, failing=False)
    return tune(Job(tiny_config(folder, ray={"num_workers": 1}), search, group))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
