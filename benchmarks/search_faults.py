"""A throughput search while its trials fail on purpose: it has to end, with the right answer and the reasons told.

As a program (``python -m benchmarks.search_faults --config FILE --tune FILE --faults RULES``) it is
``train_ray.py --tune`` with workers that fail by the rules (JSON, see :class:`tuning.injected_faults.Faults`). In:
the searches of :mod:`benchmarks.search_runs`. Out: tokens/s of what is found and of what should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from benchmarks.search import FAULTS
from benchmarks.search_runs import Judged, Searches, words
from benchmarks.stage import WrongWorkError
from train_config.loading import load_config, load_tune_config
from tuning.injected_faults import Faults
from tuning.pool import MeasuringPool
from tuning.run import tune
from tuning.settings import Settings

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


@dataclass
class FaultySearch:
    """A search with faults, and what it found beside what it should have found."""

    searches: Searches

    def speed(self, turn: int) -> float:
        """Tokens/s of what it found, in this turn."""
        return self._judged.figures[self._found][turn]

    def right(self, turn: int) -> float:
        """Tokens/s, in this turn, of the fastest configuration that has no fault."""
        return self._judged.fastest(turn)

    @cached_property
    def _found(self) -> Settings:
        return found_with_faults(self.searches)

    @cached_property
    def _judged(self) -> Judged:
        return self.searches.beside_the_fastest(FAULTS, [self._found], without_fault(self.searches))


def found_with_faults(searches: Searches) -> Settings:
    """Search while trials fail on purpose; what is found.

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
    facts |= {"trials": len(found.trials), "seconds": round(found.seconds, 1), "found": words(found.best)}
    return found.best


def without_fault(searches: Searches) -> list[Settings]:
    """The configurations that have no fault."""
    faults = Faults(_rules(searches))
    return [settings for settings in searches.fitting() if faults.of(settings) is None]


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
