"""Whole searches: on a real cluster, with a pool that answers from a formula, and with real workers."""

import contextlib
import functools
import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError, ResourceError
from tests.runs import merged, run_folder, tiny_config, train_losses
from tests.tuning.injected_faults import measure_with_faults
from train_config.loading import load_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from training.launch.driver import train
from tuning.journal import TrialJournal
from tuning.pool import MeasuringPool
from tuning.run import SearchFolder, tune
from tuning.settings import Measurement

SPACE = {"tokens": [64, 128, 256, 512], "num_workers": [0, 1], "precision": ["fp32"], "gradient_checkpointing": [False]}
STATUSES = {(512, 0): "out_of_memory", (512, 1): "crash", (128, 1): "nan", (64, 1): "timeout"}
"""Answers of the pool below for some budgets and loader processes."""


class FormulaPool:
    """Stands in for :class:`MeasuringPool`: the middle budget is the fastest, once more a little less so."""

    def __init__(
        self, config: Config, store_path: Path, *, keep_global_tokens: bool = True, delay_s: float = 0.0
    ) -> None:
        assert store_path.is_dir()
        self._delay_s = delay_s

    def __enter__(self) -> "FormulaPool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, settings, measurement, best_tokens_per_s=None, prune_margin=0.0) -> Measurement:
        time.sleep(self._delay_s)
        if (status := STATUSES.get((settings.tokens, settings.num_workers))) is not None:
            return Measurement(status, f"injected {status}", seconds=1.0)
        speed = 1000.0 + settings.tokens + 100 * settings.num_workers
        if settings.num_workers and best_tokens_per_s is None:  # what is measured once more has nothing to beat
            speed *= 0.98
        shares = {"data_wait": 0.2 if settings.num_workers == 0 else 0.01}
        return Measurement("ok", "", speed, [speed, speed], settings.tokens * 1000, 10**6, shares, seconds=1.0)


def failing(*arguments, **options) -> "FormulaPool":
    """A pool for which everything is too large."""
    pool = FormulaPool(*arguments, **options)
    pool.measure = lambda *_: Measurement("out_of_memory", "out of memory", seconds=1.0)
    return pool


def an_experiment(tmp_path: Path, address: str, **changes) -> Config:
    base = {"ray": {"num_workers": 1, "cpus_per_worker": 1, "address": address}}
    return tiny_config(tmp_path, **merged(base, changes))


def a_search(**changes) -> TuneConfig:
    base = {"name": "fast", "space": SPACE, "search": {"max_trials": 8}}
    return TuneConfig.model_validate(merged(base, changes))


def trials_of(folder: SearchFolder) -> list:
    return TrialJournal(folder.trials).trials


@pytest.fixture(scope="module")
def finished(ray_address, tmp_path_factory):
    """A search that met every kind of failure, and what it printed."""
    folder = SearchFolder(tmp_path_factory.mktemp("finished"), "fast")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tune(an_experiment(folder.path.parent, ray_address), a_search(), FormulaPool) == 0
    return folder, printed.getvalue()


def test_best_yaml_is_the_experiment_with_the_fastest_settings_and_the_mean_of_its_speeds(finished):
    folder, printed = finished
    best = load_config(folder.best)
    assert (best.batch.tokens, best.data.num_workers, best.batch.global_tokens) == (256, 1, 512)
    assert (best.ray.num_workers, best.model.backbone.hidden_size) == (1, 16)
    assert best.run.name == "tiny-fastest"
    comment = [line for line in folder.best.read_text().splitlines() if line.startswith("#")]
    assert "1,342 tokens/s" in comment[0]
    assert any("1.07 times the speed" in line for line in comment)
    assert yaml.safe_load(folder.config.read_text())["run"]["name"] == "tiny"
    assert yaml.safe_load(folder.tune.read_text())["space"]["tokens"] == SPACE["tokens"]
    assert {path.name for path in folder.path.iterdir()} >= {"hardware.txt", "tune_report.html", "tune_report.png"}
    once_more = "once more, mean of its trials: token budget 256, loader processes 1: 1,342 tokens/s"
    (line,) = (line for line in printed.splitlines() if line.startswith(once_more))
    assert line.endswith("(the fastest so far)")
    assert any("│" in line and "256" in line and "1,342" in line for line in printed.splitlines())
    assert "1,342 tokens/s" in folder.report.read_text()


def test_every_failure_is_listed_with_its_reason_and_the_fastest_alone_is_measured_twice(finished):
    trials = trials_of(finished[0])
    assert [trial.trial for trial in trials] == list(range(1, len(trials) + 1))
    *_, last = trials
    assert (last.settings.tokens, last.settings.num_workers, last.phase) == (256, 1, "confirm")
    assert len({trial.settings for trial in trials}) == len(trials) - 1
    seen = {(t.settings.tokens, t.settings.num_workers): t.measurement.reason for t in trials}
    assert (512, 1) not in seen, "it needs as much memory"
    for key in ((512, 0), (128, 1), (64, 1)):
        assert seen[key] == f"injected {STATUSES[key]}"


def test_search_of_another_experiment_or_on_other_machines_is_not_mixed_with_it(finished, ray_address):
    folder, _ = finished
    config = an_experiment(folder.path.parent, ray_address, model={"backbone": {"hidden_size": 32}})
    with pytest.raises(ConfigError, match=r"hidden_size was 16, is now 32, and the trials .* were measured"):
        tune(config, a_search(), FormulaPool)
    here = folder.hardware.read_text()
    folder.hardware.write_text("8 x 16 CPU cores, 1 GPUs (H200)\n")
    with pytest.raises(ConfigError, match=r"measured on 8 x 16 CPU cores.*this is 1 x 4 CPU cores"):
        tune(an_experiment(folder.path.parent, ray_address), a_search(), FormulaPool)
    folder.hardware.write_text(here)


def test_interrupted_search_keeps_its_trials_reports_them_and_resumes_to_the_same_end(
    finished, ray_address, tmp_path, capfd
):
    config, folder = an_experiment(tmp_path, ray_address), SearchFolder(tmp_path, "fast")

    def interrupt() -> None:
        while not folder.trials.exists() or len(folder.trials.read_bytes().splitlines()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert tune(config, a_search(), functools.partial(FormulaPool, delay_s=0.5)) == 130
    thread.join()
    kept = trials_of(folder)
    assert 2 <= len(kept) < 8
    assert folder.best.exists()
    assert folder.report.exists()
    assert tune(config, a_search(), FormulaPool) == 0
    assert f"resumes from {len(kept)} trials" in capfd.readouterr().out
    assert trials_of(folder)[: len(kept)] == kept
    undisturbed = [(trial.settings, trial.measurement) for trial in trials_of(finished[0])]
    assert [(trial.settings, trial.measurement) for trial in trials_of(folder)] == undisturbed


def test_search_in_which_nothing_fits_says_so(ray_address, tmp_path):
    with pytest.raises(ResourceError, match=r"no configuration of .* fits.*out of memory") as refusal:
        tune(an_experiment(tmp_path, ray_address), a_search(), failing)
    assert refusal.value.exit_code == 4
    assert not SearchFolder(tmp_path, "fast").best.exists()


@pytest.mark.slow
def test_real_workers_are_searched_and_best_yaml_trains_as_it_is(ray_address, tmp_path):
    config, folder = an_experiment(tmp_path, ray_address), SearchFolder(tmp_path, "fast")
    search = a_search(
        space={"tokens": [256, 512], "num_workers": [0]},
        search={"repeats": 0},
        measurement={"window_s": 0.1, "warmup_steps": 1, "max_windows": 1, "timeout_s": 120.0},
    )
    faults = {("tokens", 512): "out_of_memory"}
    pool = functools.partial(MeasuringPool, trial=functools.partial(measure_with_faults, faults))
    assert tune(config, search, pool) == 0
    statuses = {trial.settings.tokens: trial.measurement.status for trial in trials_of(folder)}
    assert statuses == {256: "ok", 512: "out_of_memory"}
    best = load_config(folder.best)
    assert train(best) == 0
    assert len(train_losses(best)) == 8
    assert run_folder(best).export.is_dir()
