"""Pictures of a search show its trials, the failed ones too, and can be drawn of next to nothing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from tuning.plots import draw_memory, draw_pareto, draw_search, draw_throughput, panel_pngs
from tuning.tune_trials import (
    Search,
    Trial,
    best_trial,
    measured,
    neighbours,
    noise_text,
    pareto,
    read_trials,
    settings_text,
    value_text,
    varied,
)

TOTAL = 1000 * 2**20
SPACE = {"tokens": [1024, 2048, 4096], "amp_dtype": ["bf16", "none"], "stage": [2]}


def record(number: int, tokens: int, speed: float | None, peak: int | None = 500, **changes: Any) -> dict[str, Any]:
    """A line of trials.jsonl; memory in MiB of 1,000."""
    settings = {"tokens": tokens, "amp_dtype": changes.pop("amp_dtype", "bf16"), "stage": 2}
    measurement = {
        "status": "ok" if speed else "out_of_memory",
        "reason": "why",
        "tokens_per_s": speed,
        "windows": [speed] if speed else [],
        "peak_memory_bytes": peak and peak * 2**20,
        "total_memory_bytes": TOTAL,
        "shares": {},
        "seconds": 2.0,
        **changes,
    }
    return {"trial": number, "settings": settings, "measurement": measurement, "phase": "sample", "time": 0.0}


RECORDS = [
    record(0, 1024, 100.0, 300),
    record(1, 2048, 150.0, 500),
    record(2, 4096, 170.0, 950),
    record(3, 2048, 60.0, 600, amp_dtype="none", status="pruned"),
    record(4, 4096, None, 1100, amp_dtype="none"),
    record(5, 1024, None, None, amp_dtype="none", status="crash"),
]


@pytest.fixture
def trials() -> list[Trial]:
    return read_trials(RECORDS)


def test_the_best_leaves_the_margin_free(trials: list[Trial]):
    assert best_trial(trials, 0.08).number == 1  # type: ignore[union-attr]
    assert best_trial(trials, 0.05).number == 2  # type: ignore[union-attr]
    assert best_trial(trials, 0.9) is None


def test_a_trial_that_was_stopped_early_is_measured_but_never_the_best():
    trials = read_trials([record(0, 1024, 100.0), record(1, 2048, 900.0, status="pruned")])
    assert [trial.number for trial in measured(trials)] == [0, 1]
    assert best_trial(trials, 0.0).number == 0  # type: ignore[union-attr]


def test_of_a_configuration_that_was_measured_twice_the_last_line_counts():
    twice = [record(0, 1024, 100.0), record(1, 2048, 90.0), record(2, 1024, 80.0)]
    assert [(trial.number, trial.tokens_per_s) for trial in read_trials(twice)] == [(1, 90.0), (2, 80.0)]


def test_the_pareto_table_has_what_no_other_beats_in_both(trials: list[Trial]):
    beaten = Trial.from_record(record(9, 1024, 90.0, 320))
    assert [trial.number for trial in pareto([*trials, beaten])] == [2, 1, 0]


def test_the_pareto_table_has_no_trial_that_was_stopped_early():
    stopped = [Trial.from_record(record(3, 1024, speed, 100, status="pruned")) for speed in (60.0, 900.0)]
    assert [trial.number for trial in pareto([*read_trials(RECORDS[:2]), *stopped])] == [1, 0]


def test_a_trial_that_was_stopped_early_has_the_median_speed_of_its_windows():
    stopped = Trial.from_record(record(0, 1024, None, status="pruned", windows=[100.0, None, 150.0, 300.0]))
    assert stopped.tokens_per_s == 150.0
    assert stopped.windows == (100.0, 150.0, 300.0)


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([25_300.0, 22_100.0, 24_000.0], " (windows 22,100 to 25,300)"),
        ([24_000.0, 26_000.0], ""),
        ([0.0, 10.0], " (windows 0 to 10)"),
        ([100.0], ""),
        ([], ""),
    ],
)
def test_a_speed_is_told_with_its_windows_where_they_differ_by_more_than_a_tenth(windows: list[float], text: str):
    assert noise_text(Trial.from_record(record(0, 1024, 24_000.0, windows=windows))) == text


def test_neighbours_differ_in_one_setting(trials: list[Trial]):
    assert [other.number for other in neighbours(trials[1], trials, "tokens")] == [0, 2]
    assert [other.number for other in neighbours(trials[1], trials, "amp_dtype")] == [3]


def test_settings_with_one_value_are_not_varied(trials: list[Trial]):
    assert varied(trials, SPACE) == ["tokens", "amp_dtype"]


def test_values_are_written_as_people_write_them():
    assert [value_text("amp_dtype", "none"), value_text("compile", False), value_text("tokens", 8192)] == [
        "fp32",
        "off",
        "8,192",
    ]
    assert settings_text(RECORDS[1]["settings"], ["tokens", "amp_dtype"]) == "token budget 2,048, precision bf16"


def test_the_picture_is_drawn_and_shows_something(trials: list[Trial], tmp_path):
    draw_search(Search(trials, SPACE, 0.08, {"tokens": 0.7}, "by hand"), tmp_path / "search.png", "a search")
    pixels = image.imread(tmp_path / "search.png")
    assert min(pixels.shape[:2]) > 1000
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 100
    assert list(tmp_path.iterdir()) == [tmp_path / "search.png"]


@pytest.mark.parametrize("records", [[], RECORDS[:1], RECORDS[4:]], ids=["none", "one", "failed ones alone"])
def test_a_search_that_found_nothing_yet_can_be_drawn(records: list[dict[str, Any]]):
    pictures = panel_pngs(Search(read_trials(records), {}, 0.08))
    assert set(pictures) == {"parallel", "throughput", "memory", "importance", "pareto"}
    assert all(image.imread(io.BytesIO(png)).size for png in pictures.values())


def test_failures_are_counted_by_reason_and_the_limit_is_drawn(trials: list[Trial]):
    throughput, memory = Figure().subplots(1, 2)
    draw_throughput(throughput, Search(trials, SPACE, 0.08))
    draw_memory(memory, Search(trials, SPACE, 0.08))
    alike = {"hollow: stopped early", "best", "bf16", "fp32"}
    assert set(_labels(throughput)) == alike | {"out of memory (1)", "crashed (1)"}
    assert set(_labels(memory)) == alike | {"all memory, 1000 MiB", "less the margin of 8%", "out of memory"}


def test_points_stand_at_their_budget_and_axes_begin_at_zero_and_end_above_the_best(trials: list[Trial]):
    throughput, memory, tradeoff = Figure().subplots(1, 3)
    draw_throughput(throughput, Search(trials, SPACE, 0.08))
    draw_memory(memory, Search(trials, SPACE, 0.08))
    draw_pareto(tradeoff, Search(trials, SPACE, 0.08))
    for axes in (throughput, memory):
        limits = [line for line in axes.lines if line.get_transform() != axes.transData]
        places = {float(x) for line in axes.lines if line not in limits for x in line.get_xdata()}
        assert places <= {1024.0, 2048.0, 4096.0}
    assert throughput.get_ylim()[0] == memory.get_ylim()[0] == tradeoff.get_ylim()[0] == 0.0
    assert throughput.get_ylim()[1] == tradeoff.get_ylim()[1] == pytest.approx(1.15 * 170.0)


def test_no_line_goes_through_what_was_stopped_early_and_the_legend_shows_none():
    records = [record(0, 1024, 100.0), record(1, 2048, 60.0, status="pruned"), record(2, 4096, 90.0, status="pruned")]
    axes = Figure().subplots()
    draw_throughput(axes, Search(read_trials(records), SPACE, 0.08))
    assert all(line.get_linestyle() == "None" for line in axes.lines)
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in hollow] == [[2048.0, 4096.0]]
    assert _labels(axes) == ["bf16", "hollow: stopped early", "best"]


def _labels(axes: Any) -> list[str]:
    return axes.get_legend_handles_labels()[1]
