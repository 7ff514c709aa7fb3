"""A search on a made-up cluster of four devices whose trials only sleep: ``-m tests.tuning.made_up_cluster FOLDER``."""

import functools
import sys
from pathlib import Path

import ray

from tests.runs import tiny_config
from tests.tuning.formula_group import FormulaGroup
from train_config.tune_schema import TuneConfig
from tuning.run import tune

DEVICES, TRIALS, SLEEP_S = 4, 16, 3.0
SPACE = {
    "tokens": [64, 128, 256, 512],
    "prefetch": [1, 2, 3, 4],
    "num_workers": [1],
    "gradient_checkpointing": [False],
    "precision": ["fp32"],
}


def main(folder: Path) -> int:
    """Search in a folder; what was begun there is resumed."""
    ray.init(num_cpus=DEVICES, num_gpus=DEVICES, include_dashboard=False, log_to_driver=False)
    search = TuneConfig.model_validate({"name": "fast", "space": SPACE, "search": {"max_trials": TRIALS}})
    group = functools.partial(FormulaGroup, delay_s=SLEEP_S, failing=False)
    return tune(tiny_config(folder, ray={"num_workers": 1}), search, group)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
