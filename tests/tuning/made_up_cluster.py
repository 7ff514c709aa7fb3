"""A search on the cluster at hand, whose two GPUs are made up: ``-m tests.tuning.made_up_cluster FOLDER``."""

import functools
import os
import sys
import time
from pathlib import Path

from esmeray.tuning.records import Job
from esmeray.tuning.run import tune
from esmeray.tuning.section import TuneConfig
from tests.runs import tiny_config
from tests.tuning.formula_group import FormulaGroup

DEVICES, TRIALS, PATIENCE_S = 2, 6, 120.0
FIXED = {"num_workers": [1], "gradient_checkpointing": [False], "precision": ["fp32"]}
SPACE = {"tokens": [64, 128, 256, 512], "prefetch": [1, 2], **FIXED}


class MeetingGroup(FormulaGroup):
    """Measures nothing before as many processes as there are devices have a trial each."""

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
    """Search in a folder."""
    search = TuneConfig.model_validate({"name": "fast", "space": SPACE, "search": {"max_trials": TRIALS}})
    group = functools.partial(MeetingGroup, delay_s=0.1, failing=False)
    return tune(Job(tiny_config(folder, ray={"num_workers": 1}), search, group))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
