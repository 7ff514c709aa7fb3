"""What limits a configuration is found in made-up searches whose limit is known, and so is what decides the speed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from tuning.limits import find_limit
from tuning.tune_importance import FEWEST_TRIALS, importance
from tuning.tune_trials import Trial, read_trials

SPACE: dict[str, list] = {"tokens": [1024, 2048, 4096], "num_workers": [0, 1], "amp_dtype": ["bf16", "none"]}
COMPUTING = {"data_wait": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "communication": 0.0}
SETTINGS = ("amp_dtype", "gradient_checkpointing", "compile", "stage", "workers")
TOTAL = 1000


def trial(tokens: int, speed: float | None, peak: int = 500, num_workers: int = 1, **changes: Any) -> dict[str, Any]:
    """A line of trials.jsonl; memory of 1,000 bytes."""
    changed = {name: changes.pop(name) for name in SETTINGS if name in changes}
    settings = {"tokens": tokens, "num_workers": num_workers, "prefetch": 2, "amp_dtype": "bf16", "stage": 2}
    measurement = {
        "status": "ok" if speed else "out_of_memory",
        "reason": "",
        "tokens_per_s": speed,
        "windows": [speed] if speed else [],
        "peak_memory_bytes": peak,
        "total_memory_bytes": TOTAL,
        "shares": COMPUTING,
        **changes,
    }
    return {"trial": tokens // 1024, "settings": settings | changed, "measurement": measurement}


def limit_of(*records: Mapping[str, Any], space: Mapping[str, list] = SPACE):
    return find_limit(read_trials(records), space, 0.08)


def test_waiting_for_batches_is_the_loader():
    waiting = {**COMPUTING, "data_wait": 0.2, "forward": 0.2, "backward": 0.5}
    found = limit_of(trial(1024, 100, num_workers=0), trial(2048, 150, shares=waiting))
    assert found.kind == "loader"
    assert "20%" in found.summary
    assert "up to 25% faster" in found.summary
    assert any("space.num_workers" in sentence for sentence in found.advice)


def test_more_loader_processes_are_not_advised_where_they_did_not_help():
    waiting = {**COMPUTING, "data_wait": 0.2}
    found = limit_of(trial(2048, 150, num_workers=0, shares=waiting), trial(2048, 100, num_workers=1))
    assert found.kind == "loader"
    assert not any("space.num_workers" in sentence for sentence in found.advice)


def test_talking_more_than_waiting_is_communication():
    found = limit_of(trial(2048, 150, shares={**COMPUTING, "communication": 0.3, "data_wait": 0.1}))
    assert found.kind == "communication"
    assert any("global_tokens" in sentence for sentence in found.advice)


def test_where_workers_talk_both_a_slow_link_and_busy_cores_are_said_to_be_looked_at():
    found = limit_of(trial(2048, 150, workers=2, **TALKING))
    assert "devices" not in found.summary
    assert "waiting for the slowest worker" in found.summary
    assert any("which link" in said and "other processes" in said for said in found.advice)
    assert not any("link" in said for said in limit_of(trial(2048, 150, workers=1, **TALKING)).advice)


@pytest.mark.parametrize("next_one", [trial(4096, None, 1100), trial(4096, 300, 950)], ids=["ran out", "no margin"])
def test_a_speed_that_still_rose_where_memory_ended_is_memory(next_one: dict[str, Any]):
    found = limit_of(trial(1024, 100), trial(2048, 150), next_one)
    assert found.kind == "memory"
    assert "2,048 tokens" in found.summary
    assert "50%" in found.summary


def test_memory_that_ended_a_flat_curve_is_compute():
    found = limit_of(trial(1024, 149), trial(2048, 150), trial(4096, None, 1100))
    assert found.kind == "compute"
    assert any("4,096 tokens ran out of memory" in sentence for sentence in found.evidence)


def test_another_kind_that_ran_out_says_nothing_of_the_best():
    found = limit_of(trial(1024, 100), trial(2048, 150), trial(4096, None, 1100, amp_dtype="none"))
    assert found.kind == "compute"


def test_a_rising_speed_at_the_end_of_the_space_asks_for_larger_budgets():
    found = limit_of(trial(2048, 100), trial(4096, 150))
    assert found.kind == "compute"
    assert any("budgets above 4,096" in sentence for sentence in found.advice)


def test_what_was_tried_is_not_advised():
    untried = limit_of(trial(2048, 150, amp_dtype="none"), space={})
    tried = limit_of(trial(2048, 150, amp_dtype="none"), trial(2048, 90, amp_dtype="bf16"))
    assert any("bf16" in sentence for sentence in untried.advice)
    assert not any("bf16" in sentence for sentence in tried.advice)
    assert any("precision bf16: -40%" in sentence for sentence in tried.evidence)


FP32 = {"amp_dtype": "none"}
WAITING = {"shares": {**COMPUTING, "data_wait": 0.2}}
TALKING = {"shares": {**COMPUTING, "communication": 0.3}}


@pytest.mark.parametrize(
    ("records", "values", "offered", "open_"),
    [
        ([trial(2048, 150, **FP32)], {"amp_dtype": ["bf16", "none"]}, "bf16 (space.amp_dtype)", "precision bf16"),
        (
            [trial(2048, 150, gradient_checkpointing=True)],
            {"gradient_checkpointing": [False, True]},
            "gradient_checkpointing: false",
            "checkpointing off",
        ),
        ([trial(2048, 150, compile=False)], {"compile": [False, True]}, "compile (space.compile", "compile on"),
        (
            [trial(1024, 100), trial(2048, 150)],
            {"tokens": [1024, 2048, 4096, 8192]},
            "budgets above 2,048 (space.tokens",
            "token budget 4,096 or 8,192",
        ),
        (
            [trial(2048, 150, num_workers=1, **WAITING)],
            {"num_workers": [0, 1, 2]},
            "more loader processes than 1 (space.num_workers)",
            "loader processes 2",
        ),
        ([trial(2048, 150, **WAITING)], {"prefetch": [2, 4]}, "a larger space.prefetch than 2", "prefetched batches 4"),
        ([trial(2048, 150, **TALKING)], {"stage": [1, 2]}, "a lower ZeRO stage than 2", "ZeRO stage 1"),
        (
            [trial(1024, 100, **FP32), trial(2048, 150, **FP32), trial(4096, None, 1100, **FP32)],
            {"amp_dtype": ["bf16", "none"]},
            "bf16 (space.amp_dtype)",
            "precision bf16",
        ),
        (
            [trial(n, speed, 999, gradient_checkpointing=False) for n, speed in ((1024, 1), (2048, 2), (4096, None))],
            {"gradient_checkpointing": [False, True]},
            "checkpointing (space.gradient_checkpointing",
            "checkpointing on",
        ),
        (
            [trial(1024, 100, workers=2), trial(2048, 150, workers=2), trial(4096, None, 1100, workers=2)],
            {"stage": [2, 3]},
            "a higher ZeRO stage than 2",
            "ZeRO stage 3",
        ),
        (
            [trial(1024, 100), trial(2048, 150), trial(4096, None, 1100)],
            {"tokens": [1024, 2048, 3072, 4096]},
            "budgets between",
            "token budget 3,072",
        ),
        ([trial(2048, None, 1100)], {"tokens": [1024, 2048]}, "smaller values of space.tokens", "token budget 1,024"),
    ],
)
def test_what_the_space_has_and_no_trial_came_to_is_to_be_tried_and_not_offered(
    records: list[dict[str, Any]], values: dict[str, list], offered: str, open_: str
):
    without, within = limit_of(*records, space={}).advice, limit_of(*records, space=values).advice
    said = f"Try {open_}, which the space has and no trial measured (raise search.max_trials"
    assert any(sentence.startswith(f"Offer {offered}") for sentence in without)
    assert any(sentence.startswith(said) for sentence in within)
    assert not any(sentence.startswith(f"Offer {offered}") for sentence in within)


def test_fewer_workers_of_the_space_are_to_be_tried():
    advice = limit_of(trial(2048, 150, workers=2, **TALKING), space={"workers": [1, 2]}).advice
    assert any(sentence.startswith("Try workers 1, which the space has") for sentence in advice)
    tried = [trial(2048, 150, workers=2, **TALKING), trial(2048, 90, workers=1)]
    assert not any("fewer" in sentence or "workers 1" in sentence for sentence in limit_of(*tried).advice)


def test_stages_that_were_tried_are_not_advised():
    found = limit_of(trial(2048, 150, **TALKING), trial(2048, 90, stage=1))
    assert found.kind == "communication"
    assert not any("stage" in sentence for sentence in found.advice)


def test_what_was_ruled_out_beside_the_best_is_not_advised():
    ruled_out = trial(2048, None, 0, status="pruned", amp_dtype="bf16")
    elsewhere = trial(4096, None, 0, status="pruned", amp_dtype="bf16")
    assert not any("bf16" in said for said in limit_of(trial(2048, 150, **FP32), ruled_out).advice)
    assert any("Try precision bf16" in said for said in limit_of(trial(2048, 150, **FP32), elsewhere).advice)


def test_prefetching_is_not_advised_without_loader_processes():
    advice = limit_of(trial(2048, 150, num_workers=0, **WAITING), space={}).advice
    assert any("loader processes" in sentence for sentence in advice)
    assert not any("prefetch" in sentence for sentence in advice)


def test_nothing_that_fits_is_said_with_the_reasons():
    found = limit_of(trial(1024, None, 1100), trial(2048, None, 1200), trial(4096, 100, 990))
    assert found.kind == "memory"
    assert "2 of 3 trials: out of memory." in found.evidence
    assert limit_of().kind == "unknown"


def speeds(cases: int) -> list[Trial]:
    """Speed made of the budget for the most part, a little of the precision, and nothing of the loader."""
    lines = []
    for number, (tokens, num_workers, precision) in enumerate(product(*SPACE.values())):
        speed = tokens / 10 + (30.0 if precision == "bf16" else 0.0)
        lines.append({**trial(tokens, speed, num_workers=num_workers, amp_dtype=precision), "trial": number})
    return read_trials(lines[:cases])


@pytest.mark.parametrize(("trials", "method"), [(12, "fANOVA"), (FEWEST_TRIALS - 1, "variance")])
def test_importance_ranks_what_the_speed_was_made_of(trials: int, method: str):
    shares, said = importance(speeds(trials))
    assert list(shares)[:2] == ["tokens", "amp_dtype"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["num_workers"] < 0.1
    assert said.startswith(method)
    assert str(trials) in said


def test_trials_that_were_stopped_early_count_for_importance():
    lines = [trial(1024 * (n + 1), 100.0 + n) for n in range(4)]
    lines += [trial(1024 * (n + 1), 40.0, amp_dtype="none", status="pruned") for n in range(4)]
    shares, _ = importance(read_trials(lines))
    assert max(shares, key=shares.__getitem__) == "amp_dtype"


def test_nothing_is_said_of_importance_without_trials():
    assert importance([]) == ({}, "")
    assert importance(speeds(2)) == ({}, "")
