"""The throughput search beside measuring every configuration of its space: how fast what it finds is, and how soon.

A small ESM-2 masked LM on real proteins, and a space of 60 configurations: token budgets, loader processes, precision,
checkpointing. Both are the program's own, as users run them: ``train_ray.py --tune`` with the algorithm ``grid``, which
measures each configuration in full, and with ``tpe`` and a fifth as many trials, from three seeds, each measuring anew.
The experiment itself has a small budget, fp32 and no loader process, so that little of the answer is given to the
search. Times are those of the whole program, its start included.

What a search found is judged beside the fastest of the exhaustive search, all measured again in turns, and in each turn
beside the one that was the fastest in the others: of many figures with noise, the largest is too large. Seeds that
found the same share its figures. ``train_ray.py`` trains with best.yaml right after each search, whose figure its steps
are held to; and, as the machine's own speed changes meanwhile, once more in turns of some seconds with the search's
workers, which measure what was found as they did before (:mod:`benchmarks.found_in_training`). Last, a search in which
trials run out of memory, crash, hang and turn NaN on purpose has to find the fastest of the configurations left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.proteins import read_proteins, write_fasta
from benchmarks.stage import Case, Comparison, Contender, Estimate, Reference, Setting, Stage

if TYPE_CHECKING:
    from benchmarks.search_runs import Searches

SEARCH, EXHAUSTIVE = "search", "every configuration"
TIME, FOUND, TRAINED, AGAIN, FAULTS = (
    "time of the search",
    "speed of what it finds",
    "the search's figure in training",
    "what it finds, in training",
    "with faults in trials",
)
CASES = (TIME, FOUND, TRAINED, AGAIN, FAULTS)
TRAINING = "train_ray.py with best.yaml"
AGREEMENT, EQUAL = "agreement with the search's figure", Reference("equal", 1.0)
RIGHT = "fastest without a fault"

ROUNDS = 3
"""Seeds of the search."""
TURNS_IN_TRAINING = 8
"""Of each seed; two turns cancel a drift."""
QUICK_PROTEINS = 200


def _cases(setting: Setting) -> Iterator[Case]:
    if setting.device != "cpu":  # a model this small says nothing of a GPU
        return
    from benchmarks.found_in_training import EachInTraining
    from benchmarks.search_faults import FaultySearch
    from benchmarks.search_runs import Searches, space_facts

    proteins = read_proteins(setting.fasta)
    setting.note("writing the store")
    searches = Searches(setting, _make_store(setting, proteins.sequences))
    searches.facts[TIME] |= {**proteins.facts, **space_facts(setting)}
    if not setting.quick:
        setting.note("starting the program once")
        searches.warm_up()
    seconds = {SEARCH: lambda seed: searches.search(seed).seconds, EXHAUSTIVE: lambda _: searches.exhaustive.seconds}
    yield _case(searches, TIME, "s", seconds, better="lower")
    turns = searches.turns
    speeds = {
        SEARCH: lambda number: searches.judged.figures[searches.search(number // turns).best][number % turns],
        EXHAUSTIVE: lambda number: searches.judged.fastest(number % turns),
    }
    yield _case(searches, FOUND, "tokens/s", speeds, rounds=ROUNDS * turns, estimate="mean")
    yield _case(searches, TRAINED, "of the larger", {AGREEMENT: searches.agreement})
    with EachInTraining(searches.in_training, TURNS_IN_TRAINING) as each:
        speeds = {SEARCH: each.measured, TRAINING: each.trained}
        yield _case(searches, AGAIN, "tokens/s", speeds, rounds=ROUNDS * TURNS_IN_TRAINING, estimate="mean")
    faulty = FaultySearch(searches)
    speeds = {SEARCH: faulty.speed, RIGHT: faulty.right}
    yield _case(searches, FAULTS, "tokens/s", speeds, rounds=turns, estimate="mean")


def _case(
    searches: Searches,
    name: str,
    unit: str,
    values: Mapping[str, Callable[[int], float]],
    better: Any = "higher",
    rounds: int = ROUNDS,
    estimate: Estimate = "median",
) -> Case:
    """A case whose contenders give a value of each round: of a seed, where there are as many rounds as seeds."""

    def contender(name: str, value: Callable[[int], float]) -> Contender:
        numbers = itertools.count()
        return Contender(name, lambda: value(next(numbers)), kind="value")

    contenders = tuple(contender(name, value) for name, value in values.items())
    facts = searches.facts[name]
    return Case(name, unit, contenders, better=better, rounds=rounds, estimate=estimate, facts=facts)


def _make_store(setting: Setting, sequences: list[str]) -> Path:
    from dataset.store.conversion import convert
    from train_config.schema import IngestSection

    chosen = sequences[: QUICK_PROTEINS if setting.quick else None]
    fasta, store = setting.folder / "proteins.fasta", setting.folder / "store"
    write_fasta(fasta, chosen, len(chosen))
    convert([str(fasta)], store, IngestSection())
    return store.resolve()


STAGE = Stage(
    name="search",
    summary="the throughput search beside measuring all of its 60 configurations: what it finds, and how soon",
    cases=_cases,
    comparisons=(
        Comparison(TIME, SEARCH, EXHAUSTIVE, {"cpu": 4.0}),
        Comparison(FOUND, SEARCH, EXHAUSTIVE, {"cpu": 0.95}),
        Comparison(TRAINED, AGREEMENT, EQUAL, {"cpu": 0.95}),
        Comparison(AGAIN, TRAINING, SEARCH, {"cpu": 0.95}),
        Comparison(FAULTS, SEARCH, RIGHT, {"cpu": 0.95}),
    ),
    packages=("ray", "optuna", "deepspeed"),
    distributions=("ray", "optuna", "deepspeed", "transformers"),
)
