"""Results of a search: best.yaml, a table, and the printed bottleneck."""

from dataclasses import replace
from pathlib import Path

from esmeray.training.config import Config
from esmeray.tuning.records import NAMES, Job, Measurement, Settings, Trial
from esmeray.tuning.results import (
    Results,
    nothing_fits,
    result_text,
    summary,
    to_set,
    write_best,
)
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace

OWN = Settings(2048, None, 1, "bf16", 1)
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
    """A measured trial; its memory is ``peak_mib`` of 1,000 MiB."""
    measured = {name: changes.pop(name) for name in ("shares",) if name in changes}
    memory = (peak_mib * 2**20, 1000 * 2**20)
    measurement = Measurement("ok", f"{speed:,.0f} tokens/s", speed, *memory, COMPUTING, 3.0)
    return Trial(number, replace(OWN, **changes), replace(measurement, **measured))


def failed(number: int, status: str, reason: str = "why", **changes) -> Trial:
    return Trial(number, replace(OWN, **changes), Measurement(status, reason, seconds=3.0))


TRIALS = [
    ok(1, 8000.0),
    ok(2, 12_000.0, 700, tokens=4096, shares=WAITING),
    failed(3, "out_of_memory", "out of memory: the peak passed <1 GiB>", tokens=4096, precision="fp32"),
    failed(4, "crash", "worker 0 was killed by signal 9", tokens=1024),
    failed(5, "timeout", "no answer for 300 s", precision="fp32"),
    failed(6, "nan", "loss was not finite in step 1", tokens=1024, precision="fp32"),
]


def results_of(*trials: Trial, margin: float = 0.08) -> Results:
    return Results(trials, SPACE, margin)


def test_search_over_budgets_alone_says_what_to_set():
    best = ok(1, 100.0)
    values = {**SPACE.values, "precision": ("bf16",), "num_workers": (1,)}
    trials = [best, ok(2, 90.0, 800, tokens=4096), failed(3, "out_of_memory", tokens=8192)]
    results = replace(results_of(*trials), space=replace(SPACE, values=values))
    largest, options = to_set(best, results, 32_000, TuneConfig(keep_global_tokens=False))
    assert largest == "Largest token budget that fits: 4,096 tokens, peak 0.78 of 0.98 GiB."
    assert options == "To set: --batch.tokens 2048 --batch.global_tokens 32768"
    assert to_set(best, results, 32_000, TuneConfig()) == [largest]


def test_best_leaves_the_margin_free():
    trials = [ok(1, 100.0), ok(2, 200.0, 950, tokens=4096)]
    assert results_of(*trials).best.number == 1
    assert results_of(*trials, margin=0.05).best.number == 2
    assert results_of(*trials, margin=0.9).best is None


def test_refusal_counts_the_results():
    message = str(nothing_fits(results_of(*TRIALS[2:4], ok(8, 100.0, 990))))
    assert "none of 3 configurations fits and leaves 8%" in message
    assert "1 out of memory, 1 crashed, 1 measured; the first failure: out of memory" in message
    assert "--tune.space.tokens" in message


def test_summary_says_what_limits_and_advises_only_what_was_not_searched():
    text = "\n".join(summary(TRIALS[1], results_of(*TRIALS)))
    assert "6 of 3 configurations tried in 0.3 min" in text
    assert "2 measured, 1 out of memory, 1 crashed, 1 hung, 1 NaN" in text
    assert "Loading is the bottleneck: 30% of a step" in text and "data.stage_dir" in text
    assert "data.num_workers" not in text


def test_best_yaml_says_how_it_was_found(tmp_path: Path):
    own, fast = ok(1, 10_000.0, 300), ok(2, 20_000.0, 500, tokens=4096)
    assert result_text(own.measurement, 0.08) == "10,000 tokens/s, peak 0.29 of 0.98 GiB"
    assert "less than 60% free" in result_text(fast.measurement, 0.6)
    assert result_text(TRIALS[2].measurement, 0.08) == "out of memory (the peak passed <1 GiB>)"
    job = Job(Config.model_validate({"run": {"storage_path": str(tmp_path)}}), TuneConfig())
    job.folder.path.mkdir()
    write_best(fast, results_of(own, fast), job)
    comment = [line for line in job.folder.best.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert comment[0].startswith("# 20,000 tokens/s, peak 0.49 of 0.98 GiB: the fastest of 2 tried configurations")
