"""A throughput search while its trials fail on purpose: it has to end, with the right answer and the reasons told.

As a program (``python -m benchmarks.search_faults --config FILE --tune FILE --faults RULES``) it is
``train_ray.py --tune`` with workers that fail by the rules (JSON, see :class:`training.injected_faults.Faults`). In:
the searches of :mod:`benchmarks.search_runs`. Out: tokens/s, by the figures of the exhaustive search, of what is found
and of what should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from functools import partial
from typing import Any

from benchmarks.search import FAULTS
from benchmarks.search_runs import Searches, words
from benchmarks.stage import WrongWorkError
from train_config.loading import load_config, load_tune_config
from training.injected_faults import Faults
from training.measuring_pool import MeasuringPool
from training.throughput_search import fits
from training.tuning import tune

FAULT_RULES: dict[str, Any] = {
    "tokens>=16384": "out_of_memory",
    "num_workers==1": "hang",
    "stage==1": "nan",
    "stage==3": "crash",
}
"""All next to the configurations that the search passes: it can't but meet them."""
STAGES, TRIALS, TIMEOUT_S = [1, 2, 3], 16, 45.0
"""ZeRO stages are there for their faults; with them, the space is three times as large."""
QUICK_FAULT_RULES: dict[str, Any] = {"tokens>=2048": "out_of_memory"}
STATUS_OF = {"out_of_memory": "out_of_memory", "crash": "crash", "hang": "timeout", "nan": "nan"}


def with_faults(searches: Searches) -> float:
    """Search while trials fail on purpose; tokens/s of what is found, by the exhaustive figures.

    Raises:
        WrongWorkError: a trial with a fault did not end as that fault does.
    """
    rules = _rules(searches)
    changes: dict[str, Any] = {"name": "faults", "measurement": {"timeout_s": TIMEOUT_S}}
    if not searches.setting.quick:
        changes |= {"space": {"stage": STAGES}, "search": {"max_trials": TRIALS}}
    settings = searches.tune_config("tpe", 0, **changes)
    command = [sys.executable, "-m", "benchmarks.search_faults"]
    found = searches.run(settings, command, "--faults", json.dumps(rules))
    faults, facts = Faults(rules), searches.facts[FAULTS]
    told: Counter[str] = Counter()
    for configuration, measurement in found.measurements.items():
        fault = faults.of(configuration)
        if fault is None:
            continue
        if measurement.status != STATUS_OF[fault]:
            said = f"{measurement.status}: {measurement.reason}"
            raise WrongWorkError(f"{words(configuration)}: {fault} was told as {said}")
        told[fault] += 1
        facts[f"reason given for {fault}"] = measurement.reason
    facts |= {f"trials with {fault}": told[fault] for fault in dict.fromkeys(rules.values())}
    facts |= {"trials": len(found.measurements), "seconds": round(found.seconds, 1), "found": words(found.best)}
    return searches.speed_by_exhaustive(found.best)


def right_without_faults(searches: Searches) -> float:
    """Tokens/s of the fastest configuration that has no fault, by the exhaustive figures."""
    faults = Faults(_rules(searches))
    margin = searches.tune_config("tpe", 0).memory_margin
    left = {s: m for s, m in searches.exhaustive.measurements.items() if faults.of(s) is None and fits(m, margin)}
    best = max(left, key=lambda settings: left[settings].tokens_per_s or 0.0)
    searches.facts[FAULTS]["right answer"] = words(best)
    return left[best].tokens_per_s or 0.0


def _rules(searches: Searches) -> dict[str, Any]:
    return QUICK_FAULT_RULES if searches.setting.quick else FAULT_RULES


def main() -> int:
    """Search with faults."""
    parser = argparse.ArgumentParser()
    for option in ("--config", "--tune", "--faults"):
        parser.add_argument(option, required=True)
    arguments = parser.parse_args()
    pool = partial(MeasuringPool, faults=Faults(json.loads(arguments.faults)))
    return tune(load_config(arguments.config), load_tune_config(arguments.tune), pool)


if __name__ == "__main__":
    sys.exit(main())
