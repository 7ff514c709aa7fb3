"""Files that a search leaves: what limits, best.yaml and one page that needs nothing else."""

import base64
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from esmeray.training.config import Config
from esmeray.tuning.plots import importances
from esmeray.tuning.records import NAMES, Job, Measurement, SearchFolder, Settings, Trial
from esmeray.tuning.report import advice_for, shares_text, write_tune_report
from esmeray.tuning.results import Results, describe, noise_lines, nothing_fits, to_set, write_best
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace

OWN = Settings(2048, None, 1, 4, "bf16", False, False, 2, 1)
OFFERED = {"tokens": (1024, 2048, 4096), "precision": ("bf16", "fp32"), "num_workers": (0, 1)}
SPACE = SearchSpace(
    {name: OFFERED.get(name, (getattr(OWN, name),)) for name in NAMES},
    tuple(replace(OWN, tokens=tokens) for tokens in (2048, 1024, 4096)),
    {},
    OWN,
    {},
)
COMPUTING = {"data_wait": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "communication": 0.0}
WAITING = COMPUTING | {"data_wait": 0.3}


def ok(number: int, speed: float, peak_mib: int = 500, **changes) -> Trial:
    """A trial that was measured; memory in MiB of 1,000."""
    measured = {name: changes.pop(name) for name in ("shares", "windows", "status") if name in changes}
    memory = (peak_mib * 2**20, 1000 * 2**20)
    measurement = Measurement("ok", f"{speed:,.0f} tokens/s", speed, [speed], *memory, COMPUTING, 3.0)
    return Trial(str(number), number, replace(OWN, **changes), replace(measurement, **measured))


def failed(number: int, status: str, reason: str = "why", **changes) -> Trial:
    return Trial(str(number), number, replace(OWN, **changes), Measurement(status, reason, seconds=3.0))


TRIALS = [
    ok(1, 8000.0),
    ok(2, 12_000.0, 700, tokens=4096, shares=WAITING),
    failed(3, "out_of_memory", "out of memory: the peak passed <1 GiB>", tokens=4096, precision="fp32"),
    failed(4, "crash", "worker 0 was killed by signal 9", tokens=1024),
    failed(5, "timeout", "no answer for 300 s", precision="fp32"),
    failed(6, "nan", "loss was not finite in step 1", tokens=1024, precision="fp32"),
    ok(7, 3000.0, status="pruned", tokens=4096, num_workers=0),
]


def results_of(*trials: Trial, margin: float = 0.08) -> Results:
    return Results(trials, SPACE, margin)


def limits_of(*trials: Trial) -> tuple[str, str]:
    """Return what limits the best of these trials, and all that is advised."""
    results = results_of(*trials)
    limit, *_ = advice = advice_for(results.best, results)
    return limit.topic, " ".join([limit.finding, *map(str, advice)])


def written_report(folder: Path, *trials: Trial) -> tuple[SearchFolder, str]:
    written = SearchFolder(folder, "fast")
    write_tune_report(results_of(*trials), written)
    return written, written.report.read_text(encoding="utf-8")


def test_page_needs_nothing_else_and_lists_every_trial_with_its_reason(tmp_path: Path):
    folder, page = written_report(tmp_path, *TRIALS)
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture, validate=True) == folder.picture.read_bytes()
    assert not re.search(r"https?://|href|@import|url\(", page)
    assert all(escape(trial.measurement.reason) in page for trial in TRIALS if trial.measurement.status != "ok")
    assert "7 of 3 configurations tried: 2 measured, 1 out of memory, 1 crashed, 1 hung, 1 NaN, 1 stopped early" in page
    assert "12,000 tokens/s with token budget 4,096" in page
    assert "1.50× the experiment" in page
    assert "Loading is the bottleneck: 30%" in page
    assert {path.name for path in folder.path.iterdir()} == {"tune_report.html", "tune_report.png"}


def test_search_that_found_nothing_is_reported_and_the_refusal_counts_the_results(tmp_path: Path):
    assert "no configuration fits" in written_report(tmp_path)[1]
    message = str(nothing_fits(results_of(*TRIALS[2:4], ok(8, 100.0, 990))))
    assert "none of 3 configurations fits and leaves 8%" in message
    assert "1 out of memory, 1 crashed, 1 measured; the first failure: out of memory" in message
    assert "--tune.space.tokens" in message


def test_trials_within_the_noise_of_the_fastest_are_named():
    results = replace(results_of(ok(1, 97.5), ok(2, 100.0, tokens=4096), ok(3, 96.0, tokens=1024)), agreement=0.03)
    assert noise_lines(results) == ["Equally fast within the noise of 3%: 1 trial (1)."]
    assert noise_lines(replace(results, agreement=0.01)) == []


def test_search_over_budgets_alone_says_what_to_set():
    best = ok(1, 100.0)
    values = {**SPACE.values, "precision": ("bf16",), "num_workers": (1,)}
    trials = [best, ok(2, 90.0, 800, tokens=4096), failed(3, "out_of_memory", tokens=8192)]
    results = replace(results_of(*trials), space=replace(SPACE, values=values))
    largest, options = to_set(best, results, 32_000, TuneConfig(keep_global_tokens=False))
    assert largest == "Largest token budget that fits: 4,096 tokens, peak 800 MiB of 1000 MiB."
    assert options == "To set: --batch.tokens 2048 --batch.global_tokens 32768"
    predicting = TuneConfig(keep_global_tokens=False, inference=True)
    assert "2048 tokens per batch" in to_set(best, results, 32_000, predicting)[1]
    assert to_set(best, results, 32_000, TuneConfig()) == [largest]


def test_best_was_measured_to_the_end_and_leaves_the_margin_free():
    trials = [ok(1, 100.0), ok(2, 200.0, 950, tokens=4096), ok(3, 300.0, status="pruned", tokens=1024)]
    assert results_of(*trials).best.number == 1
    assert results_of(*trials, margin=0.05).best.number == 2
    assert results_of(*trials, margin=0.9).best is None


def test_loading_limits_where_steps_wait_for_it_and_only_what_was_not_tried_is_advised():
    waits = ok(1, 100.0, shares=WAITING)
    topic, advice = limits_of(waits)
    assert topic == "loading"
    assert advice.startswith("Loading is the bottleneck: 30% o")
    assert "data.num_workers" in advice
    assert "data.num_workers" not in limits_of(waits, ok(2, 90.0, num_workers=0))[1]
    assert shares_text(waits).startswith("Time per step: waiting for batches 30%")


def test_memory_limits_where_the_next_budget_did_not_fit_and_speed_was_rising():
    trials = [ok(1, 150.0), ok(2, 100.0, tokens=1024), failed(3, "out_of_memory", tokens=4096)]
    topic, advice = limits_of(*trials)
    assert topic == "memory"
    assert "2,048 tokens is the largest token budget that fits" in advice
    assert "gradient_checkpointing: true" in advice
    assert limits_of(ok(1, 101.0), *trials[1:])[0] == "compute", "speed was not rising"
    assert limits_of(*trials[:2])[0] == "compute", "a larger one may fit"
    assert limits_of(ok(1, 100.0, shares={}))[0] == "unknown"


def test_importances_name_the_setting_that_decides():
    trials = [
        ok(tokens, speed + tokens / 1000, tokens=tokens, precision=precision)
        for tokens in OFFERED["tokens"]
        for precision, speed in (("bf16", 200.0), ("fp32", 100.0))
    ]
    shares = importances(results_of(*trials))
    assert next(iter(shares)) == "precision"
    assert sum(shares.values()) == pytest.approx(1.0)
    assert importances(results_of(*trials[:2])) == {}, "too few"


def test_the_picture_has_each_trial_at_its_budget_and_what_failed_at_zero(saved_figures, tmp_path: Path):
    written_report(tmp_path, *TRIALS)
    speed, memory, shares = saved_figures[0].axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in speed.lines}
    assert drawn["bf16"] == [[2048, 8000], [4096, 12_000]]  # the highest of each budget
    assert drawn["best"] == [[4096, 12_000]]
    assert (drawn["out of memory (1)"], drawn["crashed (1)"]) == ([[4096, 0]], [[1024, 0]])
    assert sorted(speed.lines[0].get_xydata().tolist()) == [[2048, 8000], [4096, 3000], [4096, 12_000]]
    in_gib = {line.get_label(): line.get_ydata() for line in memory.lines}
    assert in_gib["bf16"] == pytest.approx([500 / 1024, 700 / 1024])
    assert in_gib["memory minus the margin of 8%"][0] == pytest.approx(0.92 * 1000 / 1024)
    assert [text.get_text() for text in shares.texts] == ["too few trials"]


def test_terminal_and_best_yaml_show_the_windows_of_a_noisy_speed(tmp_path: Path):
    noisy = ok(1, 10_000.0, 300, windows=[2790.0, 23_059.0, 10_000.0])
    fast = ok(2, 20_000.0, 500, tokens=4096)
    results = results_of(noisy, fast)
    assert "10,000 tokens/s (windows 2,790 to 23,059), peak 300 MiB" in describe(noisy, results)
    assert "20,000 tokens/s, peak 500 MiB" in describe(fast, results)
    assert "less than 60% free" in describe(fast, replace(results, margin=0.6))
    assert "out of memory (the peak" in describe(TRIALS[2], results)
    job = Job(Config.model_validate({"run": {"storage_path": str(tmp_path)}}), TuneConfig())
    job.folder.path.mkdir()
    write_best(fast, results, job)
    comment = [line for line in job.folder.best.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert comment[0].startswith("# 20,000 tokens/s, peak 500 MiB of 1000 MiB: the fastest of 2 tried configurations")
    assert comment[2].startswith("# It is 2.00 times the speed of token budget 2,048")
    assert comment[2].endswith("10,000 tokens/s (windows 2,790 to 23,059).")
