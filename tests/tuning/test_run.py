"""Whole searches: on a real cluster, with a pool that answers from a formula, and with real workers."""

import contextlib
import csv
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
from tuning.run import SearchFolder, dry_run_tune, tune
from tuning.settings import Measurement

SPACE = {"tokens": [64, 128, 256, 512], "num_workers": [0, 1], "amp_dtype": ["none"], "gradient_checkpointing": [False]}
STATUSES = {(512, 1): "crash", (128, 1): "nan", (64, 1): "timeout"}
"""What the pool below answers for some budgets and loader processes; 512 without any runs out of memory."""


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
        if settings.tokens == 512 and settings.num_workers == 0:
            return Measurement("out_of_memory", "out of memory", seconds=1.0)
        if (status := STATUSES.get((settings.tokens, settings.num_workers))) is not None:
            return Measurement(status, f"injected {status}", seconds=1.0)
        speed = 1000.0 + settings.tokens + 100 * settings.num_workers
        if settings.num_workers and best_tokens_per_s is None:  # what is measured once more has nothing to beat
            speed *= 0.98
        return Measurement(
            "ok",
            "",
            tokens_per_s=speed,
            windows=[speed, speed],
            peak_memory_bytes=settings.tokens * 1000,
            total_memory_bytes=10**6,
            shares={"data_wait": 0.2 if settings.num_workers == 0 else 0.01},
            seconds=1.0,
        )


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


def trials_of(tmp_path: Path) -> list:
    return TrialJournal(SearchFolder(tmp_path, "fast").trials).trials


@pytest.fixture(scope="module")
def finished(ray_address, tmp_path_factory):
    """A search that met every kind of failure."""
    folder = SearchFolder(tmp_path_factory.mktemp("finished"), "fast")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tune(an_experiment(folder.path.parent, ray_address), a_search(), FormulaPool) == 0
    (folder.path / "printed.txt").write_text(printed.getvalue())
    return folder


def test_best_yaml_is_the_experiment_with_the_fastest_settings_beside_the_resolved_files(finished):
    best = load_config(finished.best)
    assert (best.batch.tokens, best.data.num_workers, best.batch.global_tokens) == (256, 1, 512)
    assert (best.ray.num_workers, best.model.backbone.hidden_size) == (1, 16)
    assert best.run.name == "tiny-fastest"
    comment = [line for line in finished.best.read_text().splitlines() if line.startswith("#")]
    assert "1,342 tokens/s" in comment[0]
    assert any("1.07 times the speed" in line for line in comment)
    assert yaml.safe_load(finished.config.read_text())["run"]["name"] == "tiny"
    assert yaml.safe_load(finished.tune.read_text())["space"]["tokens"] == SPACE["tokens"]
    assert {path.name for path in finished.path.iterdir()} >= {"hardware.txt", "tune_report.html", "tune_report.png"}


def test_the_fastest_has_one_speed_in_every_place_the_mean_of_its_trials(finished):
    lines = (finished.path / "printed.txt").read_text().splitlines()
    (once_more,) = (line for line in lines if line.startswith("once more"))
    assert once_more.startswith("once more, mean of its trials: token budget 256, loader processes 1: 1,342 tokens/s")
    assert once_more.endswith("(the fastest so far)")
    row = next(line for line in lines if line.count("│") and "256" in line)
    assert "1,342" in row
    assert "1,342 tokens/s" in finished.report.read_text()
    assert next(csv.DictReader(finished.pareto.open()))["tokens_per_s"] == "1342.4"


def test_every_failure_is_listed_with_its_reason_and_the_fastest_alone_is_measured_twice(finished):
    trials = TrialJournal(finished.trials).trials
    assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
    again = [trial.settings for trial in trials if trial.phase == "confirm"]
    assert again == [trial.settings for trial in trials[-len(again) :]]
    assert [(s.tokens, s.num_workers) for s in again] == [(256, 1)]
    assert len({trial.settings for trial in trials}) == len(trials) - len(again)
    seen = {(t.settings.tokens, t.settings.num_workers): t.measurement for t in trials}
    assert seen[512, 0].status == "out_of_memory"
    assert (512, 1) not in seen, "it needs as much memory"
    assert seen[128, 1].reason == "injected nan"
    assert seen[64, 1].reason == "injected timeout"


def test_same_command_answers_from_the_journal(finished, ray_address, capfd):
    before = finished.trials.read_bytes()
    config = an_experiment(finished.path.parent, ray_address)
    assert tune(config, a_search(), failing) == 0
    assert finished.trials.read_bytes() == before
    assert load_config(finished.best).batch.tokens == 256
    assert "resumes from" in capfd.readouterr().out


def test_search_of_another_experiment_is_not_mixed_with_it(finished, ray_address):
    config = an_experiment(finished.path.parent, ray_address, model={"backbone": {"hidden_size": 32}})
    with pytest.raises(ConfigError, match=r"model\.backbone\.hidden_size: .* measured with 16, now it is 32"):
        tune(config, a_search(), FormulaPool)


def test_search_on_other_machines_is_not_mixed_with_it(finished, ray_address):
    here = finished.hardware.read_text()
    finished.hardware.write_text("8 x 16 CPU cores, 1 GPUs (H200)\n")
    try:
        with pytest.raises(ConfigError, match=r"measured on 8 x 16 CPU cores.*this is 1 x 4 CPU cores"):
            tune(an_experiment(finished.path.parent, ray_address), a_search(), FormulaPool)
    finally:
        finished.hardware.write_text(here)


def test_interrupted_search_keeps_its_trials_reports_them_and_goes_on_to_the_same_end(finished, ray_address, tmp_path):
    config = an_experiment(tmp_path, ray_address)
    journal = SearchFolder(tmp_path, "fast").trials

    def interrupt() -> None:
        while not journal.exists() or len(journal.read_bytes().splitlines()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert tune(config, a_search(), functools.partial(FormulaPool, delay_s=0.5)) == 130
    thread.join()
    kept = trials_of(tmp_path)
    assert 2 <= len(kept) < 8
    assert SearchFolder(tmp_path, "fast").best.exists()
    assert SearchFolder(tmp_path, "fast").report.exists()
    assert tune(config, a_search(), FormulaPool) == 0
    assert trials_of(tmp_path)[: len(kept)] == kept
    undisturbed = [(trial.settings, trial.measurement) for trial in TrialJournal(finished.trials).trials]
    assert [(trial.settings, trial.measurement) for trial in trials_of(tmp_path)] == undisturbed


def test_search_in_which_nothing_fits_says_so(ray_address, tmp_path):
    with pytest.raises(ResourceError, match=r"no configuration of .* fits") as refusal:
        tune(an_experiment(tmp_path, ray_address), a_search(), failing)
    assert refusal.value.exit_code == 4
    assert "out of memory" in str(refusal.value)
    assert not SearchFolder(tmp_path, "fast").best.exists()


def test_dry_run_shows_the_space_and_what_comes_first_and_starts_nothing(tmp_path, capsys):
    config = tiny_config(tmp_path, ray={"num_workers": 1, "address": "local"})
    assert dry_run_tune(config, a_search(space={"amp_dtype": ["none", "fp16"]})) == 0
    output = capsys.readouterr().out
    assert "64, 128, 256, 512" in output
    assert "8: fp16, which needs a GPU" in output
    assert output.index("  token budget 256") < output.index("  token budget 512")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_real_workers_are_searched_and_best_yaml_trains_as_it_is(ray_address, tmp_path):
    config = an_experiment(tmp_path, ray_address)
    search = a_search(
        space={"tokens": [128, 256, 512], "num_workers": [0]},
        measurement={"window_s": 0.1, "warmup_steps": 1, "max_windows": 2, "timeout_s": 120.0},
    )
    pool = functools.partial(
        MeasuringPool, trial=functools.partial(measure_with_faults, {("tokens", 512): "out_of_memory"})
    )
    assert tune(config, search, pool) == 0
    statuses = {trial.settings.tokens: trial.measurement.status for trial in trials_of(tmp_path)}
    assert statuses[512] == "out_of_memory"
    best = load_config(SearchFolder(tmp_path, "fast").best)
    assert statuses[best.batch.tokens] == "ok"
    assert train(best) == 0
    assert len(train_losses(best)) == 8
    assert run_folder(best).export.is_dir()
