"""The search against machines that are made up: how good, how economical, and what it does with what fails."""

import json
import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import pytest

from tests.runs import merged, tiny_config
from train_config.tune_schema import TuneConfig
from training.launch.placement import NodeResources
from tuning.search import ThroughputSearch, most_trials
from tuning.settings import Measurement, Settings
from tuning.space import SearchSpace, make_space, needs_at_least

NODES = [NodeResources(cpus=8, gpus=0)]
TOTAL_BYTES = 1 << 30
LARGE = {
    "data": {"max_length": 254, "num_workers": 1},
    "batch": {"tokens": 1024, "global_tokens": 16384},
    "ray": {"num_workers": 1},
    "training": {"amp_dtype": "none"},
}


def a_space(tmp_path, own: dict | None = None, **values: list) -> SearchSpace:
    config = tiny_config(tmp_path, **merged(LARGE, own or {}))
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


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_recomputing_is_given_up_first_where_the_experiment_begins_with_it(machine, tmp_path):
    space = a_space(tmp_path, {"model": {"backbone": {"gradient_checkpointing": True}}}, compile=[False, True])
    assert space.default.gradient_checkpointing
    best, whole_s = exhaustive(space, machine)
    search = ThroughputSearch(space, settings_for())
    assert run(search, machine) <= 0.25 * whole_s
    assert search.knowledge.speed(search.knowledge.best()) >= 0.95 * best


def test_no_configuration_is_measured_twice_nor_one_that_needs_more_than_what_ran_out(tmp_path):
    machine = MACHINES["memory limits"]
    machine.asked.clear()
    space = a_space(tmp_path)
    run(ThroughputSearch(space, settings_for(max_trials=1000, repeats=0)), machine)
    assert len(set(machine.asked)) == len(machine.asked)
    ran_out: list[Settings] = []
    for settings in machine.asked:
        assert not any(needs_at_least(settings, smaller) for smaller in ran_out)
        if machine.peak(settings) > 0.92 * TOTAL_BYTES:
            ran_out.append(settings)
    assert ran_out


def test_every_configuration_is_measured_or_answered_where_trials_allow(tmp_path):
    machine, space = Machine(bytes_a_token=150_000), a_space(tmp_path)
    for algorithm in ("tpe", "random", "grid"):
        learned: dict[Settings, str] = {}
        search = ThroughputSearch(
            space,
            settings_for(algorithm=algorithm, max_trials=1000),
            learned=lambda settings, measurement, phase, into=learned: into.update({settings: measurement.status}),
        )
        run(search, machine)
        assert set(learned) == set(space.settings)
        if algorithm == "grid":
            pruned = [settings for settings, status in learned.items() if status == "pruned"]
            assert pruned
            assert all(machine.peak(settings) > 0.92 * TOTAL_BYTES for settings in pruned)


@pytest.mark.parametrize(
    ("budgets", "largest"),
    [(list(range(512, 16385, 512)), 12), ([512, 1024, 2048, 4096], 2), ([4096, 8192], 0), ([512, 1024], 2)],
)
def test_largest_budget_is_bracketed_by_doubling_and_bisecting(budgets, largest, tmp_path):
    """Without a fixed global batch any budget will do; ``largest`` is how many of them fit."""
    config = tiny_config(tmp_path, **LARGE)
    values = {"tokens": budgets, "num_workers": [1], "amp_dtype": ["none"], "gradient_checkpointing": [False]}
    search_section = {"max_trials": 1000, "repeats": 0}
    tune = TuneConfig.model_validate({"space": values, "keep_global_tokens": False, "search": search_section})
    space = make_space(config, tune, NODES)
    at_most = budgets[largest - 1] if largest else budgets[0] - 1
    machine = Machine(bytes_a_token=0.92 * TOTAL_BYTES / (at_most + 0.5), state_bytes=0)
    phases: dict[int, str] = {}
    search = ThroughputSearch(space, tune, learned=lambda s, m, phase: phases.update({s.tokens: phase}))
    run(search, machine)
    bracket = sorted(tokens for tokens, phase in phases.items() if phase == "bracket")
    fitting = [tokens for tokens in bracket if tokens <= at_most]
    assert fitting[-1:] == budgets[largest - 1 : largest] if largest else fitting == []
    assert len(bracket) <= 2 * math.ceil(math.log2(len(budgets))) + 1


def test_fastest_that_leaves_too_little_memory_free_is_not_the_best(tmp_path):
    machine = Machine(best_tokens=65536, width=6.0, bytes_a_token=60_000, state_bytes=0)
    space = a_space(tmp_path, num_workers=[1], amp_dtype=["none"], gradient_checkpointing=[False])
    for margin, best in ((0.0, 16384), (0.2, 8192)):
        search = ThroughputSearch(space, settings_for(max_trials=1000, memory_margin=margin))
        run(search, machine)
        assert search.knowledge.best().tokens == best


@pytest.mark.parametrize("status", ["crash", "timeout", "nan", "refused"])
def test_what_fails_otherwise_says_nothing_of_its_neighbours(status, tmp_path):
    space = a_space(tmp_path)
    machine = Machine(best_tokens=2048, faults={lambda s: s.tokens == 1024: status})
    statuses: list[str] = []
    search = ThroughputSearch(space, settings_for(), learned=lambda s, m, phase: statuses.append(m.status))
    run(search, machine)
    assert search.knowledge.best().tokens == 2048
    assert status in statuses
    assert not [m for m in search.knowledge.measurements.values() if "did not fit" in m.reason]


def test_every_kind_of_failure_at_once_leaves_the_right_answer(tmp_path):
    space = a_space(tmp_path)
    machine = Machine(
        best_tokens=2048,
        faults={
            lambda s: s.tokens >= 8192: "out_of_memory",
            lambda s: s.tokens == 4096 and s.num_workers == 2: "crash",
            lambda s: s.gradient_checkpointing: "timeout",
            lambda s: s.amp_dtype == "bf16": "nan",
        },
    )
    search = ThroughputSearch(space, settings_for())
    run(search, machine)
    assert search.knowledge.best() == Settings(2048, None, 1, 4, "none", False, False, 2, 1)
    assert {"out_of_memory", "timeout", "nan"} <= {m.status for m in search.knowledge.measurements.values()}


@pytest.mark.parametrize("algorithm", ["tpe", "random", "grid"])
@pytest.mark.parametrize("interrupted_after", [0, 1, 5, 11, 16])
def test_search_that_goes_on_ends_as_if_it_had_never_stopped(algorithm, interrupted_after, tmp_path):
    space, settings = a_space(tmp_path), settings_for(algorithm=algorithm, max_trials=15)

    def attempt(known: list[tuple[Settings, Measurement]], most: int) -> list[Settings]:
        machine, earlier = Machine(bytes_a_token=100_000), {}
        for tried, measurement in known:
            if measurement.windows or measurement.status != "pruned":
                earlier.setdefault(tried, []).append(measurement)
        run(ThroughputSearch(space, settings, earlier, lambda s, m, _: known.append((s, m))), machine, most)
        return machine.asked

    whole = attempt([], 1000)
    assert len(whole) > len(set(whole)) >= 15
    known: list[tuple[Settings, Measurement]] = []
    before = attempt(known, interrupted_after)
    assert before + attempt(known, 1000) == whole


def test_fault_on_the_way_to_the_best_is_passed_by(tmp_path):
    # In fp32 the cache is full at half the budget that is best in bf16, and there bf16 fails.
    class Cached(Machine):
        def speed(self, s: Settings) -> float:
            return super().speed(s) * (1.5 if s.tokens == 4096 and s.amp_dtype == "none" else 1.0)

    faults = {lambda s: s.tokens <= 4096 and s.amp_dtype == "bf16": "nan"}
    machine = Cached(best_tokens=8192, bf16=1.9, faults=faults)
    space = a_space(tmp_path, num_workers=[0, 1, 2])
    best, _ = exhaustive(space, machine)
    for seed in range(3):
        search = ThroughputSearch(space, settings_for(seed=seed))
        run(search, machine)
        found = search.knowledge.best()
        assert found.tokens == 8192 and found.amp_dtype == "bf16"
        assert search.knowledge.speed(found) == pytest.approx(best)


@pytest.mark.parametrize("own", [0, 1])
def test_value_with_which_every_trial_hangs_is_given_up(own, tmp_path):
    machine = Machine(loader_limit=(0.5, 1.0, 0.9), faults={lambda s: s.num_workers == 1: "timeout"})
    space = a_space(tmp_path, {"data": {"num_workers": own}}, compile=[False, True])
    best, _ = exhaustive(space, machine)
    search = ThroughputSearch(space, settings_for())
    run(search, machine)
    assert search.knowledge.speed(search.knowledge.best()) == best
    assert sum(s.num_workers == 1 for s in machine.asked) in (3, 4)
    reasons = {m.reason for s, m in search.knowledge.measurements.items() if s.num_workers == 1 and s.tokens <= 4096}
    assert any(re.fullmatch(r"num_workers 1 hung in each of [34] trials", reason) for reason in reasons)


def test_hangs_of_a_value_that_also_runs_are_no_reason_to_give_it_up(tmp_path):
    machine = Machine(best_tokens=8192, faults={lambda s: s.num_workers == 1 and s.tokens < 8192: "timeout"})
    space = a_space(tmp_path, {"data": {"num_workers": 0}})
    best, _ = exhaustive(space, machine)
    search = ThroughputSearch(space, settings_for())
    run(search, machine)
    assert search.knowledge.speed(search.knowledge.best()) == best


def test_grid_measures_in_full_and_the_others_stop_what_can_not_win(tmp_path):
    space = a_space(tmp_path)
    for algorithm in ("grid", "tpe"):
        search = ThroughputSearch(space, settings_for(algorithm=algorithm))
        trial = search.suggest("0")
        assert (trial["best_tokens_per_s"], trial["max_windows"]) == (None, 6 if algorithm == "grid" else 2)
        machine = Machine()
        first = machine.measure(search.measuring.settings)
        search.on_trial_complete("0", {"measurement": json.dumps(asdict(first))})
        threshold = search.suggest("1")["best_tokens_per_s"]
        assert threshold == (None if algorithm == "grid" else first.tokens_per_s)


@dataclass
class Flattered(Machine):
    """The first figure of some configurations is too good, or a second trial of them fails."""

    first: Callable[[Settings], float] = lambda _: 1.0
    second: str = "ok"

    def measure(self, s: Settings, best: float | None = None) -> Measurement:
        again = s in self.asked
        result = super().measure(s, best)
        if again:
            return replace(result, status=self.second) if self.second != "ok" else result
        factor = self.first(s)
        return replace(result, tokens_per_s=result.tokens_per_s * factor, windows=[w * factor for w in result.windows])


def confirmed_search(space: SearchSpace, machine: Machine, **search) -> tuple[ThroughputSearch, list[Settings]]:
    """A search to its end, and what was measured once more."""
    again: list[Settings] = []
    searching = ThroughputSearch(
        space, settings_for(**search), learned=lambda s, _, phase: again.append(s) if phase == "confirm" else None
    )
    machine.asked.clear()
    run(searching, machine)
    return searching, again


def test_figure_that_was_too_good_is_found_out_by_measuring_the_fastest_once_more(tmp_path):
    space = a_space(tmp_path, num_workers=[1], amp_dtype=["none"], gradient_checkpointing=[False])
    true = Machine(best_tokens=4096, width=8.0)
    machine = Flattered(best_tokens=4096, width=8.0, first=lambda s: 1.025 if s.tokens == 2048 else 1.0)
    luck, _ = confirmed_search(space, machine, repeats=0)
    assert luck.knowledge.best().tokens == 2048
    search, again = confirmed_search(space, machine)
    best = search.knowledge.best()
    assert best.tokens == 4096 and {s.tokens for s in again} >= {2048, 4096}
    assert search.knowledge.speed(best) == pytest.approx(true.speed(best))


def test_one_that_is_far_ahead_is_measured_once_more_alone(tmp_path):
    space = a_space(tmp_path, num_workers=[1], amp_dtype=["none"], gradient_checkpointing=[False])
    search, again = confirmed_search(space, Machine(best_tokens=4096, width=1.0))
    assert again == [search.knowledge.best()]
    assert confirmed_search(space, Machine(best_tokens=4096, width=8.0), repeats=0)[1] == []


def test_configuration_that_fails_the_second_time_is_not_the_fastest(tmp_path):
    space = a_space(tmp_path, num_workers=[1], amp_dtype=["none"], gradient_checkpointing=[False])
    machine = Flattered(best_tokens=4096, width=8.0, second="crash")
    search, again = confirmed_search(space, machine, repeats=2)
    assert len(set(again)) == len(again) == 2
    assert search.knowledge.best() not in again
    assert all(search.knowledge.measurements[s].status == "crash" for s in again)


@dataclass
class Drifting(Machine):
    """Other programs come and go: its speed wanders by a tenth (one standard deviation) within half a minute."""

    seed: int = 0
    _pace: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._pace = self._random.gauss(0, 0.1)

    def measure(self, s: Settings, best: float | None = None) -> Measurement:
        pace = math.exp(self._pace)
        result = super().measure(s, None if best is None else best / pace)
        kept = math.exp(-result.seconds / 30)
        self._pace = self._pace * kept + self._random.gauss(0, 0.1 * math.sqrt(1 - kept**2))
        if result.tokens_per_s is None:
            return result
        windows = [window * pace * math.exp(self._random.gauss(0, 0.05)) for window in result.windows]
        return replace(result, tokens_per_s=statistics.mean(windows), windows=windows)


@pytest.mark.parametrize("name", ["cache of a CPU", "the larger the faster", "loader limits", "noise"])
def test_on_a_machine_that_changes_its_speed_what_is_found_is_mostly_among_the_fastest(name, tmp_path):
    space = a_space(tmp_path, num_workers=[0, 1, 2])
    shares = []
    for seed in range(10):
        machine = Drifting(**(asdict(MACHINES[name]) | {"faults": {}, "asked": []}), seed=seed)
        search = ThroughputSearch(space, settings_for(seed=seed, max_trials=12))
        run(search, machine)
        fastest = max(machine.speed(s) for s in space.settings if machine.peak(s) <= 0.92 * TOTAL_BYTES)
        shares.append(machine.speed(search.knowledge.best()) / fastest)
    assert statistics.mean(shares) >= 0.95
    assert sum(share >= 0.95 for share in shares) >= 8


def test_trials_stop_when_the_time_is_used_up(tmp_path):
    machine = Machine()
    run(ThroughputSearch(a_space(tmp_path), settings_for(time_budget_s=12.0)), machine)
    assert len(machine.asked) in (3, 4)  # of 3 or 5 s each


def test_machinery_that_gives_no_results_ends_the_search_and_is_not_remembered(tmp_path):
    learned: list = []
    search = ThroughputSearch(a_space(tmp_path), settings_for(), learned=lambda *fact: learned.append(fact))
    asked = 0
    while search.suggest(str(asked)) != ThroughputSearch.FINISHED:
        search.on_trial_complete(str(asked), None, error=True)
        asked += 1
    assert asked == 3
    assert learned == []


def test_trials_are_a_fifth_of_the_space_unless_told_otherwise():
    assert most_trials(TuneConfig().search, 168) == 33
    assert most_trials(TuneConfig().search, 20) == 12
    assert most_trials(TuneConfig().search, 5) == 5
    assert most_trials(settings_for(algorithm="grid").search, 168) == 168
    assert most_trials(settings_for(max_trials=7).search, 168) == 7
