"""The search against machines that are made up: how good, how economical, and what it does with what fails."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import pytest

from tests.runs import merged, tiny_config
from train_config.tune_schema import TuneConfig
from training.cluster import NodeResources
from training.search_space import SearchSpace, make_space
from training.throughput import Measurement, Settings
from training.throughput_search import ThroughputSearch

NODES = [NodeResources(cpus=8, gpus=0)]
TOTAL_BYTES = 1 << 30
LARGE = {
    "data": {"max_length": 254, "num_workers": 1},
    "batch": {"tokens": 1024, "global_tokens": 16384},
    "ray": {"num_workers": 1},
    "training": {"amp_dtype": "none"},
}


def a_space(tmp_path, **values: list) -> SearchSpace:
    config = tiny_config(tmp_path, **merged(LARGE, {}))
    return make_space(config, TuneConfig.model_validate({"space": values}), NODES)


@dataclass
class Machine:
    """A machine in numbers: speed grows with the budget and falls again when a cache is full."""

    best_tokens: float = 4096
    width: float = 3.0
    bf16: float = 1.4
    loader_limit: tuple[float, float, float] = (0.7, 1.0, 0.95)
    checkpointing: float = 0.75
    compiled: float = 1.15
    bytes_a_token: float = 20_000
    state_bytes: float = 1e7
    noise: float = 0.0
    faults: dict[Callable[[Settings], bool], str] = field(default_factory=dict)
    asked: list[Settings] = field(default_factory=list)

    def speed(self, s: Settings) -> float:
        away = (math.log2(s.tokens) - math.log2(self.best_tokens)) / self.width
        speed = 10_000 * math.exp(-(away**2)) * (self.bf16 if s.amp_dtype == "bf16" else 1.0)
        speed *= self.loader_limit[s.num_workers] * (self.checkpointing if s.gradient_checkpointing else 1.0)
        wobble = (hash((s.tokens, s.num_workers, s.compile, s.amp_dtype == "bf16")) % 1000 / 500 - 1) * self.noise
        return speed * (self.compiled if s.compile else 1.0) * (1 + wobble)

    def peak(self, s: Settings) -> int:
        a_token = (
            self.bytes_a_token * (0.3 if s.gradient_checkpointing else 1.0) * (0.6 if s.amp_dtype != "none" else 1)
        )
        return int(self.state_bytes + a_token * s.tokens)

    def measure(self, s: Settings, best: float | None = None) -> Measurement:
        self.asked.append(s)
        for holds, status in self.faults.items():
            if holds(s):
                return Measurement(status, f"injected {status}", seconds=5.0)
        if self.peak(s) > TOTAL_BYTES:
            return Measurement("out_of_memory", "memory ran out", peak_memory_bytes=TOTAL_BYTES, seconds=3.0)
        speed = self.speed(s)
        memory = {"peak_memory_bytes": self.peak(s), "total_memory_bytes": TOTAL_BYTES}
        if best is not None and speed < 0.85 * best:
            return Measurement("pruned", "too slow to win", speed, [speed], seconds=3.0, **memory)
        return Measurement("ok", "", speed, [speed, speed], seconds=5.0, shares={"data_wait": 0.05}, **memory)


def settings_for(**search) -> TuneConfig:
    margin = search.pop("memory_margin", 0.08)
    return TuneConfig.model_validate({"search": search, "memory_margin": margin})


def run(search: ThroughputSearch, machine: Machine, most: int = 1000) -> float:
    """Drive the search as Ray Tune does; seconds that its trials took."""
    seconds = 0.0
    for number in range(most):
        trial = search.suggest(str(number))
        if trial == ThroughputSearch.FINISHED:
            break
        measurement = machine.measure(Settings(**trial["settings"]), trial["best_tokens_per_s"])
        seconds += measurement.seconds
        search.on_trial_complete(str(number), {"measurement": json.dumps(asdict(measurement))})
    return seconds


def exhaustive(space: SearchSpace, machine: Machine, margin: float = 0.08) -> tuple[float, float]:
    """The best speed there is, and the seconds that measuring everything in full takes."""
    every = [machine.measure(settings) for settings in space.settings]
    machine.asked.clear()
    fit = [m.tokens_per_s for m in every if m.status == "ok" and m.peak_memory_bytes <= (1 - margin) * TOTAL_BYTES]
    return max(fit), sum(m.seconds for m in every)


MACHINES = {
    "cache of a CPU": Machine(best_tokens=2048, width=2.0),
    "the larger the faster": Machine(best_tokens=65536, width=6.0, bytes_a_token=1000),
    "memory limits": Machine(best_tokens=65536, width=4.0, bytes_a_token=150_000),
    "small budgets win": Machine(best_tokens=256, width=2.5),
    "bf16 is slow": Machine(bf16=0.6, best_tokens=1500),
    "loader limits": Machine(loader_limit=(0.4, 0.7, 1.0)),
    "own loading is best": Machine(loader_limit=(1.0, 0.8, 0.7), compiled=0.5),
    "checkpointing makes room that pays": Machine(
        best_tokens=200_000, width=3.0, bytes_a_token=300_000, checkpointing=0.95
    ),
    "noise": Machine(noise=0.05),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_a_quarter_of_the_exhaustive_time_reaches_95_percent_of_the_best(machine, seed, tmp_path):
    space = a_space(tmp_path, compile=[False, True])
    assert len(space) >= 60
    best, whole_s = exhaustive(space, machine)
    search = ThroughputSearch(space, settings_for(seed=seed))
    seconds = run(search, machine)
    assert seconds <= 0.25 * whole_s
    assert search.knowledge.speed(search.knowledge.best()) >= 0.95 * best
