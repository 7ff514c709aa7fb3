"""What a search leaves behind says how sure its speeds are, and offers only what was measured to the end."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

import pytest

from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from tuning.results import describe, write_best, write_pareto
from tuning.settings import Settings
from tuning.space import SearchSpace
from tuning.tune_trials import Trial, read_trials

OWN = asdict(Settings(1024, None, 1, 4, "bf16", False, False, 2, 1))
FASTER = OWN | {"tokens": 2048}
VALUES = {name: (value,) for name, value in OWN.items()} | {"tokens": (1024, 2048)}
SPACE = SearchSpace(VALUES, (Settings(**OWN), Settings(**FASTER)), {}, Settings(**OWN))  # type: ignore[arg-type]


def record(number: int, tokens: int, status: str, windows: list[float], peak: int) -> dict:
    """A line of trials.jsonl, with the speed of the last window; memory in MiB of 1,000."""
    measurement = {
        "status": status,
        "tokens_per_s": windows[-1] if status == "ok" else None,
        "windows": windows,
        "peak_memory_bytes": peak * 2**20,
        "total_memory_bytes": 1000 * 2**20,
    }
    return {"trial": number, "settings": OWN | {"tokens": tokens}, "measurement": measurement}


@pytest.fixture
def trials() -> list[Trial]:
    """The experiment's own, which is noisy, and one that is faster."""
    return read_trials(
        [record(1, 1024, "ok", [2790.0, 23_059.0, 10_000.0], 300), record(2, 2048, "ok", [19_500.0, 20_000.0], 500)]
    )


def test_the_terminal_says_the_windows_of_a_noisy_trial_alone(trials: list[Trial]):
    noisy, steady = (describe(trial, SPACE, 0.08) for trial in trials)
    assert "10,000 tokens/s (windows 2,790 to 23,059), peak 300 MiB" in noisy
    assert "20,000 tokens/s, peak 500 MiB" in steady


def test_the_comment_of_the_best_says_the_windows_of_what_it_is_compared_with(trials: list[Trial], tmp_path: Path):
    path = tmp_path / "best.yaml"
    write_best(path, trials[1], trials, SPACE, Config.model_validate({}), TuneConfig.model_validate({}))
    comment = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert comment[0].startswith("# 20,000 real tokens/s, peak 500 MiB of 1000 MiB: the fastest of 2 configurations")
    assert (
        comment[2] == "# It is 2.00 times the speed of token budget 1,024, 10,000 tokens/s (windows 2,790 to 23,059)."
    )


def test_the_pareto_table_has_no_trial_that_was_stopped_early(trials: list[Trial], tmp_path: Path):
    stopped = Trial.from_record(record(3, 512, "pruned", [5000.0], 100))
    write_pareto(tmp_path / "pareto.csv", [*trials, stopped], 0.08)
    rows = list(csv.DictReader((tmp_path / "pareto.csv").open(encoding="utf-8")))
    assert [(row["trial"], row["tokens_per_s"]) for row in rows] == [("2", "20000.0"), ("1", "10000.0")]
