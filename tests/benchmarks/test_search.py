"""The benchmark of the throughput search: its space is large enough, and what a search left is judged as it should."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import search_faults
from benchmarks.search import CASES, STAGE
from benchmarks.search_faults import FAULT_RULES, FaultySearch, found_with_faults, without_fault
from benchmarks.search_runs import FINALISTS, SPACE, TURNS, Found, Judged, Searches, read_found, words
from benchmarks.stage import Setting, WrongWorkError
from train_config.loading import dump_config
from training.launch.placement import NodeResources
from tuning.injected_faults import Faults
from tuning.journal import TrialJournal
from tuning.settings import Measurement, Settings
from tuning.space import make_space

OWN = Settings(1024, None, 0, 4, "none", True, False, 2, 1)
MARGIN = 0.08


@pytest.fixture
def searches(tmp_path: Path) -> Searches:
    return Searches(Setting("cpu", quick=False, folder=tmp_path), tmp_path / "store")


def every_configuration() -> dict[Settings, Measurement]:
    """Faster with a larger budget, bf16, kept activations and more loader processes, each by a known factor."""
    figures = {}
    for values in product(*SPACE.values()):
        settings = replace(OWN, **dict(zip(SPACE, values, strict=True)))
        speed = math.log2(settings.tokens) * (1.5 if settings.amp_dtype == "bf16" else 1.0)
        speed *= (0.8 if settings.gradient_checkpointing else 1.0) * (1 + 0.01 * settings.num_workers)
        figures[settings] = Measurement("ok", "", tokens_per_s=speed, windows=[speed])
    return figures


def found(measurements: dict[Settings, Measurement]) -> Found:
    best = max(measurements, key=lambda settings: measurements[settings].tokens_per_s or 0.0)
    return Found(10.0, Path("search"), measurements, best)


def test_the_space_has_sixty_configurations_and_the_experiment_is_among_the_slow_ones(searches: Searches):
    space = make_space(searches.config, searches.tune_config("tpe", 0), [NodeResources(2, 0)])
    assert len(space) >= 60
    assert not space.left_out
    figures = {settings: measurement.tokens_per_s or 0.0 for settings, measurement in every_configuration().items()}
    assert set(space.settings) == set(figures)
    slower = sum(speed < figures[space.default] for speed in figures.values())
    assert slower < len(space) / 3


def test_the_search_takes_a_fifth_of_the_trials(searches: Searches):
    assert searches.tune_config("tpe", 0).search.max_trials == math.prod(map(len, SPACE.values())) / 5
    assert searches.tune_config("grid", 0).search.max_trials is None


def test_every_case_has_a_floor_on_the_cpu():
    assert {comparison.case for comparison in STAGE.comparisons if comparison.floors.get("cpu")} == set(CASES)


def test_a_gpu_is_left_alone(tmp_path: Path):
    assert list(STAGE.cases(Setting("cuda", quick=True, folder=tmp_path))) == []


def test_what_a_search_left_is_read_back(searches: Searches, tmp_path: Path):
    faster = replace(OWN, tokens=2048, amp_dtype="bf16")
    journal = TrialJournal(tmp_path / "trials.jsonl")
    journal.add(OWN, Measurement("ok", "", tokens_per_s=100.0, windows=[100.0]), "bracket")
    journal.add(faster, Measurement("ok", "", tokens_per_s=150.0, windows=[150.0]), "refine")
    journal.add(replace(OWN, tokens=4096), Measurement("pruned", "too large"), "sample")
    best = tmp_path / "best.yaml"
    best.write_text(dump_config(faster.applied(searches.config, keep_global_tokens=True)), encoding="utf-8")
    result = read_found(tmp_path, 12.0, MARGIN)
    assert (result.best, result.figure, len(result.measurements)) == (faster, 150.0, 2)
    best.write_text(dump_config(searches.config), encoding="utf-8")
    with pytest.raises(WrongWorkError, match="none of its trials"):
        read_found(tmp_path, 12.0, MARGIN)


def test_a_search_that_found_nothing_is_no_result(tmp_path: Path):
    TrialJournal(tmp_path / "trials.jsonl").add(OWN, Measurement("crash", "it died"), "bracket")
    with pytest.raises(WrongWorkError, match="no configuration"):
        read_found(tmp_path, 1.0, MARGIN)


def test_the_right_answer_with_faults_is_the_fastest_that_has_none(searches: Searches):
    searches.exhaustive = found(every_configuration())
    right = replace(OWN, tokens=8192, num_workers=2, amp_dtype="bf16", gradient_checkpointing=False)
    assert Faults(FAULT_RULES).of(searches.exhaustive.best) is not None
    assert max(without_fault(searches), key=searches.speed_by_exhaustive) == right


class NoisyPool:
    """Workers whose speed is known but for some noise, which one lucky figure of the exhaustive search had as well."""

    def __init__(self, searches: Searches) -> None:
        self._speed = dict(searches.exhaustive.measurements)
        self.asked: list[Settings] = []

    def measure(self, settings: Settings, measurement: Any) -> Measurement:
        self.asked.append(settings)
        rate = (self._speed[settings].tokens_per_s or 0.0) * (1.5 if len(self.asked) == 1 else 1.0)
        return Measurement("ok", "", tokens_per_s=rate)


def test_what_was_found_is_judged_beside_the_fastest_in_turns(searches: Searches, monkeypatch: pytest.MonkeyPatch):
    searches.exhaustive = found(every_configuration())
    pool = NoisyPool(searches)
    monkeypatch.setattr(Searches, "_pool", lambda _: nullcontext(pool))
    slow = replace(OWN, tokens=1024)
    judged = searches.beside_the_fastest(CASES[1], [slow], searches.fitting())
    fastest = sorted(searches.fitting(), key=searches.speed_by_exhaustive, reverse=True)[:FINALISTS]
    assert set(judged.figures) == {*fastest, slow}
    assert {len(figures) for figures in judged.figures.values()} == {TURNS}
    assert len(pool.asked) == TURNS * (FINALISTS + 1)
    firsts = pool.asked[:: FINALISTS + 1]
    assert firsts[: FINALISTS + 1] == pool.asked[: FINALISTS + 1] == firsts[FINALISTS + 1 :][: FINALISTS + 1], "rotates"
    assert len(searches.facts[CASES[1]]) == FINALISTS + 1


def test_one_lucky_figure_makes_nothing_the_fastest():
    steady, lucky = replace(OWN, tokens=1024), replace(OWN, tokens=2048)
    judged = Judged({lucky: [90.0, 150.0, 90.0, 90.0], steady: [100.0, 101.0, 102.0, 103.0]})
    assert judged.fastest(1) == 101.0, "where it was lucky it was not chosen by that"
    assert Judged({steady: [100.0]}).fastest(0) == 100.0


def test_answer_with_faults_is_judged_beside_those_without(searches: Searches, monkeypatch: pytest.MonkeyPatch):
    searches.exhaustive = found(every_configuration())
    monkeypatch.setattr(Searches, "_pool", lambda _: nullcontext(NoisyPool(searches)))
    slow = replace(OWN, tokens=1024)
    monkeypatch.setattr(search_faults, "found_with_faults", lambda _: slow)
    faulty = FaultySearch(searches)
    assert faulty.speed(1) == searches.speed_by_exhaustive(slow)
    assert faulty.right(1) == max(map(searches.speed_by_exhaustive, without_fault(searches)))


@pytest.fixture
def searched(searches: Searches, monkeypatch: pytest.MonkeyPatch):
    """What found_with_faults makes of a search that measured these statuses beside a sound configuration."""

    def judge(statuses: dict[Settings, Any], best: Settings) -> Settings:
        searches.exhaustive = found(every_configuration())
        measured = {best: Measurement("ok", "", tokens_per_s=1.0)}
        measured |= {settings: Measurement(status, "why") for settings, status in statuses.items()}
        monkeypatch.setattr(Searches, "run", lambda *_: Found(1.0, Path("faults"), measured, best))
        return found_with_faults(searches)

    return judge


def test_faults_are_counted_and_their_reasons_listed(searched, searches: Searches):
    sound = replace(OWN, tokens=8192, gradient_checkpointing=False)
    statuses = {
        replace(OWN, tokens=16384): "out_of_memory",
        replace(OWN, tokens=8192, stage=3): "crash",
        replace(OWN, tokens=8192, num_workers=1): "timeout",
        replace(OWN, tokens=4096, stage=1): "nan",
    }
    assert searched(statuses, sound) == sound
    facts = searches.facts["with faults in trials"]
    for fault in set(FAULT_RULES.values()):
        assert facts[f"trials with {fault}"] == 1
        assert facts[f"reason given for {fault}"] == "why"


def test_a_fault_that_is_told_as_another_is_wrong(searched):
    with pytest.raises(WrongWorkError, match="hang was told as nan"):
        searched({replace(OWN, tokens=8192, num_workers=1): "nan"}, OWN)


def test_a_configuration_that_fails_is_no_answer(searched):
    with pytest.raises(WrongWorkError, match="out_of_memory was told as ok"):
        searched({}, replace(OWN, tokens=16384))


def test_a_configuration_is_told_by_what_is_varied():
    assert words(OWN) == "token budget 1,024, loader processes 0, precision fp32, checkpointing on"


def test_the_program_with_faults_searches_with_a_pool_that_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = SimpleNamespace()
    monkeypatch.setattr(search_faults, "tune", lambda config, tune, pool: vars(given).update(pool=pool) or 0)
    for name, text in (("c.yaml", "run: {name: a}\n"), ("t.yaml", "name: b\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = ["program", "--config", str(tmp_path / "c.yaml"), "--tune", str(tmp_path / "t.yaml"), "--faults"]
    monkeypatch.setattr("sys.argv", [*command, '{"tokens>=2048": "nan"}'])
    assert search_faults.main() == 0
    assert given.pool.keywords["faults"].of(replace(OWN, tokens=4096)) == "nan"
