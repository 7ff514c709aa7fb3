"""The search on simulated machines: quality of the result, number of trials, and handling of failures."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.cluster.placement import NodeResources
from esmeray.common.errors import DataError
from esmeray.tuning.records import Job, Measurement, Settings
from esmeray.tuning.results import Results
from esmeray.tuning.search import MEASUREMENT, METRIC, Search, next_budget, read_trials
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace, make_space, needs_at_least
from tests.runs import tiny_config

TOTAL_BYTES = 1 << 30
LARGE = {
    "data": {"max_length": 254, "num_workers": 1},
    "batch": {"tokens": 1024, "global_tokens": 16384},
    "ray": {"num_workers": 1},
    "training": {"precision": "fp32"},
}


def a_space(**values: list) -> SearchSpace:
    job = Job(tiny_config(Path("unused"), **LARGE), TuneConfig.model_validate({"space": values}))
    return make_space(job, [NodeResources(cpus=8, gpus=0)])


@dataclass
class Machine:
    """A simulated machine: speed grows with the budget and falls again when a cache is full."""

    best_tokens: float = 4096
    width: float = 3.0
    bf16: float = 1.4
    loader_limit: tuple[float, float, float] = (0.7, 1.0, 0.95)
    second_worker: float = 1.3
    bytes_a_token: float = 20_000
    noise: float = 0.0
    seed: int = 0
    faults: dict[Callable[[Settings], bool], str] = field(default_factory=dict)
    asked: list[Settings] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def speed(self, s: Settings) -> float:
        away = (math.log2(s.tokens) - math.log2(self.best_tokens)) / self.width
        speed = 10_000 * math.exp(-(away**2)) * (self.bf16 if s.precision == "bf16" else 1.0)
        return speed * self.loader_limit[s.num_workers] * (self.second_worker if s.workers == 2 else 1.0)

    def peak(self, s: Settings) -> int:
        kept = 0.6 if s.precision != "fp32" else 1.0
        return int(1e7 + self.bytes_a_token * kept * s.tokens)

    def measure(self, s: Settings) -> Measurement:
        self.asked.append(s)
        for holds, status in self.faults.items():
            if holds(s):
                return Measurement(status, f"injected {status}", seconds=5.0)
        if self.peak(s) > TOTAL_BYTES:
            return Measurement("out_of_memory", "out of memory", peak_memory_bytes=TOTAL_BYTES, seconds=3.0)
        speed = self.speed(s) * self._random.gauss(1.0, self.noise)
        memory = {"peak_memory_bytes": self.peak(s), "total_memory_bytes": TOTAL_BYTES}
        return Measurement("ok", "", speed, seconds=5.0, **memory)


def settings_for(**search) -> TuneConfig:
    return TuneConfig.model_validate({"search": search})


def run(space: SearchSpace, search: TuneConfig, machine: Machine, trials: Path, side_by_side: int = 1) -> Results:
    """Run a search to its end, with ``side_by_side`` concurrent trials."""
    trials.parent.mkdir(exist_ok=True)
    searcher, running, ended = Search(space, search, trials), [], 0
    while True:
        trial_id = f"{len(machine.asked) + len(running)}-{ended}"
        asked = searcher.suggest(trial_id) if len(running) < side_by_side else None
        if isinstance(asked, dict):
            running.append((trial_id, Settings(**asked["settings"])))
            continue
        if not running:
            return Results(read_trials(trials), space, search.memory_margin)
        trial_id, settings = running.pop(0)
        measurement = machine.measure(settings)
        speed = measurement.speed(search.memory_margin)
        searcher.on_trial_complete(trial_id, {METRIC: speed, MEASUREMENT: json.dumps(asdict(measurement))})
        ended += 1


MACHINES = {
    "the larger the faster": {"best_tokens": 65536, "width": 6.0, "bytes_a_token": 1000},
    "memory limits": {"best_tokens": 65536, "width": 4.0, "bytes_a_token": 150_000},
    "bf16 is slow": {"bf16": 0.6, "best_tokens": 1500},
    "own loading is best": {"loader_limit": (1.0, 0.8, 0.7), "second_worker": 0.5},
    "workers starve each other": {"second_worker": 0.8, "best_tokens": 2048},
}


@pytest.mark.slow
def test_a_third_of_the_configurations_reaches_95_percent_of_the_best(tmp_path):
    """The search runs on five machines with 2 % noise."""
    space = a_space(workers=[1, 2])
    for seed, (name, numbers) in enumerate(MACHINES.items()):
        machine = Machine(**numbers)
        best = max(machine.measure(settings).speed(0.08) for settings in space.settings)
        results = run(space, settings_for(), Machine(**numbers, noise=0.02, seed=seed), tmp_path / name)
        assert len(results.trials) <= len(space) / 3
        assert machine.speed(results.best.settings) >= 0.95 * best, name


@pytest.mark.slow
def test_search_skips_measured_and_too_large_configurations(tmp_path):
    machine, space = Machine(**MACHINES["memory limits"]), a_space()
    run(space, settings_for(max_trials=1000), machine, tmp_path / "trials")
    assert len(set(machine.asked)) == len(machine.asked)
    any_out_of_memory = [asked for asked in machine.asked if machine.peak(asked) > 0.92 * TOTAL_BYTES]
    for index, asked in enumerate(machine.asked):
        assert not any(
            needs_at_least(asked, smaller) for smaller in any_out_of_memory if smaller in machine.asked[:index]
        )
    left = set(space.settings) - set(machine.asked)
    assert any_out_of_memory and left
    assert all(machine.peak(configuration) > 0.92 * TOTAL_BYTES for configuration in left)


def test_every_kind_of_failure_at_once_leaves_the_right_answer(tmp_path):
    machine = Machine(
        best_tokens=2048,
        faults={
            lambda s: s.tokens >= 8192: "out_of_memory",
            lambda s: s.tokens == 4096 and s.num_workers == 2: "crash",
            lambda s: s.num_workers == 0: "timeout",
            lambda s: s.precision == "bf16": "nan",
        },
    )
    results = run(a_space(), settings_for(max_trials=30), machine, tmp_path / "trials")
    assert results.best.settings == Settings(2048, None, 1, "fp32", 1)
    assert {"out_of_memory", "timeout", "nan"} <= {trial.measurement.status for trial in results.trials}


def test_concurrent_trials_differ_and_stop_at_the_time_budget(tmp_path):
    machine = Machine()
    run(a_space(), settings_for(max_trials=20), machine, tmp_path / "trials", side_by_side=4)
    assert len(set(machine.asked)) == len(machine.asked) == 20
    results = run(a_space(), settings_for(time_budget_s=12.0), Machine(), tmp_path / "short")
    assert len(results.trials) == 3  # a trial takes 5 s


def test_resumed_search_knows_what_was_measured_also_with_other_limits(tmp_path):
    space, machine, folder = a_space(), Machine(), tmp_path / "trials"
    assert len(run(space, settings_for(max_trials=5), machine, folder).trials) == 5
    assert len(run(space, settings_for(max_trials=5), machine, folder).trials) == 5
    smaller = a_space(num_workers=[1])
    assert len(run(smaller, settings_for(max_trials=8), machine, folder).trials) == 8
    assert len(set(machine.asked)) == 8


def test_unfinished_trial_is_measured_again_and_a_torn_line_removed(tmp_path):
    space, trials = a_space(), tmp_path / "trials.jsonl"
    asked = Search(space, settings_for(), trials).suggest("killed")
    assert read_trials(trials) == []
    with trials.open("ab") as file:
        file.write(b'{"op_code":')
    assert Search(space, settings_for(), trials).suggest("again") == asked
    (tmp_path / "other").write_text("{}\n{}\n")
    with pytest.raises(DataError, match=r"other: not trials of this version .*; choose another --tune\.name"):
        read_trials(tmp_path / "other")


@settings(deadline=None)
@given(end=st.integers(500, 200_000), own=st.integers(0, 39))
def test_largest_budget_that_fits_is_found_in_few_steps(end, own):
    budgets = [2**exponent * quarter // 4 for exponent in range(9, 19) for quarter in (4, 5, 6, 7)]
    fitting, too_large, tokens = [], [], budgets[own]
    while tokens is not None:
        (fitting if tokens <= end else too_large).append(tokens)
        tokens = next_budget(budgets, fitting, too_large)
    assert max(fitting, default=None) == max((tokens for tokens in budgets if tokens <= end), default=None)
    assert len(fitting) + len(too_large) <= 14
