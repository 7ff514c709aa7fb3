"""Whole searches on a real cluster, with simulated and with real workers."""

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from esmeray.cluster.placement import Workers
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.monitoring.sampling.host import memory_of_this_machine
from esmeray.training.config import load_config
from esmeray.training.launch.driver import dry_run
from esmeray.tuning import ray_tune
from esmeray.tuning.records import Job, SearchFolder
from esmeray.tuning.run import tune
from esmeray.tuning.search import read_trials
from esmeray.tuning.section import MeasurementSection, TuneConfig
from tests.runs import merged, tiny_config
from tests.tuning import formula_group
from tests.tuning.formula_group import STATUSES, FormulaGroup, RefusingGroup
from tests.tuning.injected_faults import a_group

pytestmark = pytest.mark.slow

QUICK = {"window_s": 0.1}
SPACE = {"tokens": [64, 128, 256, 512], "num_workers": [0, 1], "precision": ["fp32"]}


def a_job(folder: Path, address: str, make_group=FormulaGroup, model: dict | None = None, **search) -> Job:
    """A search with simulated workers on the tests' cluster."""
    ray = {"num_workers": 1, "cpus_per_worker": 1, "address": address}
    base = {"name": "fast", "space": SPACE, "search": {"max_trials": 8}}
    config = tiny_config(folder, ray=ray, model=model or {})
    return Job(config, TuneConfig.model_validate(merged(base, search)), make_group)


def configurations_of(folder: SearchFolder) -> list[tuple[int, int]]:
    return [(trial.settings.tokens, trial.settings.num_workers) for trial in read_trials(folder.trials)]


@pytest.fixture(scope="module")
def finished(ray_address, tmp_path_factory):
    """A search with every kind of failure that was interrupted and resumed with a higher limit.

    Returns its folder, its output, and the configurations that it had measured before the interruption.
    """
    folder = SearchFolder(tmp_path_factory.mktemp("finished"), "fast")

    def interrupt() -> None:
        while len(read_trials(folder.trials)) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    slow = functools.partial(FormulaGroup, delay_s=0.5)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tune(a_job(folder.path.parent, ray_address, slow, search={"max_trials": 5})) == 130
        assert folder.best.exists() and folder.table.exists()
        before = configurations_of(folder)
        assert tune(a_job(folder.path.parent, ray_address)) == 0
    return folder, printed.getvalue(), before


def test_interrupted_search_resumes_and_keeps_its_trials(finished):
    folder, printed, before = finished
    assert 2 <= len(before) < 5
    assert f"resuming after {len(before)} trials" in printed
    after = configurations_of(folder)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after) == 7


def test_best_yaml_is_the_experiment_with_the_fastest_settings(finished):
    folder, printed, _ = finished
    best = load_config(folder.best)
    assert (best.batch.tokens, best.data.num_workers, best.batch.global_tokens) == (256, 1, 512)
    assert (best.ray.num_workers, best.model.backbone.hidden_size) == (1, 16)
    assert best.run.name == "tiny-fastest"
    assert yaml.safe_load(folder.config.read_text())["run"]["name"] == "tiny"
    assert yaml.safe_load(folder.tune.read_text())["space"]["tokens"] == SPACE["tokens"]
    assert {path.name for path in folder.path.iterdir()} >= {"hardware.txt", "trials.csv"}
    assert "token budget 256, loader processes 1: 1,356 tokens/s, peak 0.00 of 0.00 GiB (the fastest so far)" in printed
    assert any("│" in line and "256" in line and "1,356" in line for line in printed.splitlines())


def test_every_failed_trial_is_listed_with_its_reason(finished):
    folder, *_ = finished
    seen = {(t.settings.tokens, t.settings.num_workers): t.measurement.reason for t in read_trials(folder.trials)}
    assert (512, 1) not in seen, "it needs as much memory"
    for key in ((512, 0), (128, 1), (64, 1)):
        assert seen[key] == f"injected {STATUSES[key]}"
    statuses = {trial.measurement.status for trial in read_trials(folder.trials)}
    assert statuses == {"ok", "nan", "out_of_memory", "timeout"}
    assert [*folder.ray_tune.glob("*/result.json")]


def test_search_refuses_trials_of_another_experiment_or_machine(finished, ray_address):
    folder, *_ = finished
    storage = folder.path.parent
    with pytest.raises(ConfigError, match=r"hidden_size was 16, is now 32, but .* already has trials"):
        tune(a_job(storage, ray_address, model={"backbone": {"hidden_size": 32}}))
    with pytest.raises(
        ConfigError, match=r"tune\.keep_global_tokens was True, is now False, but .* already has trials"
    ):
        tune(a_job(storage, ray_address, keep_global_tokens=False))
    here = folder.hardware.read_text()
    folder.hardware.write_text("8 x 16 CPU cores, 1 GPUs (H200)\n")
    with pytest.raises(ConfigError, match=r"measured on 8 x 16 CPU cores.*this is 1 x 4 CPU cores"):
        tune(a_job(storage, ray_address))
    folder.hardware.write_text(here)


def test_search_in_which_nothing_starts_or_fits_ends_with_the_reason(ray_address, tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match="did not start: no room"):
        tune(a_job(tmp_path, ray_address, RefusingGroup))
    monkeypatch.setattr(ray_tune, "_run_trials", lambda *_: None)
    job = a_job(tmp_path, ray_address, name="empty")
    with pytest.raises(ResourceError, match=r"none of 0 configurations fits and leaves 8% .* \(none measured\)"):
        tune(job)
    assert not job.folder.best.exists()


def test_two_devices_take_two_trials_side_by_side_in_a_process_each(open_cluster, tmp_path):
    command = [sys.executable, "-m", "tests.tuning.formula_group", str(tmp_path)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = open_cluster.environment | {"TMPDIR": str(temporary)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=120, check=True)
    configurations = {trial.settings for trial in read_trials(SearchFolder(tmp_path, "fast").trials)}
    assert len(configurations) == formula_group.TRIALS
    assert len([*(tmp_path / "meeting").iterdir()]) == formula_group.DEVICES
    assert not [*temporary.iterdir()]


@pytest.mark.nightly
def test_crash_and_hang_of_real_workers_are_recorded_as_results(ray_address, tmp_path):
    folder = SearchFolder(tmp_path, "fast")
    faults = {("batch.tokens", 512): "crash", ("batch.tokens", 128): "hang"}  # the experiment's 256 comes first
    search = {"space": {"tokens": [128, 256, 512], "num_workers": [0]}, "measurement": QUICK | {"timeout_s": 8.0}}
    assert tune(a_job(tmp_path, ray_address, functools.partial(a_group, faults), **search)) == 0
    results = {trial.settings.tokens: trial.measurement for trial in read_trials(folder.trials)}
    assert {tokens: result.status for tokens, result in results.items()} == {256: "ok", 512: "crash", 128: "timeout"}
    assert results[128].reason == "a worker did not finish within 8 s"
    assert "a worker's process ended" in results[512].reason
    best = load_config(folder.best)
    assert best.batch.tokens == 256
    assert dry_run(best) == 0


FAULTS = {("batch.batch_size", 2): "nan", ("batch.batch_size", 3): "out_of_memory"}


def test_two_workers_survive_nan_and_out_of_memory_in_one(ray_address, store_path, tmp_path, monkeypatch):
    monkeypatch.setattr("esmeray.tuning.workers.GRACE_S", 0.0)  # workers that agree need no grace period
    workers = Workers(2, 1, use_gpu=False)
    search = TuneConfig(measurement=MeasurementSection(**QUICK))
    job = Job(tiny_config(tmp_path, ray={"num_workers": 2}), search, store_path=str(store_path))
    group = a_group(FAULTS, workers, job)

    def measured(batch_size: int):
        return group.measure(replace(job.own_settings(workers), batch_size=batch_size))

    first = measured(4)
    assert first.status == "ok", first.reason
    assert first.tokens_per_s > 0
    assert first.total_memory_bytes == memory_of_this_machine().total // 2

    spoilt = measured(2)
    assert (spoilt.status, spoilt.reason) == ("nan", "loss or gradient was not finite in step 1")
    assert measured(4).status == "ok"

    # The fault is in a step of the second worker, while the first waits for it in a collective.
    too_large = measured(3)
    assert too_large.status == "out_of_memory"
    assert "injected" in too_large.reason
    assert 0 < too_large.peak_memory_bytes < too_large.total_memory_bytes
    assert list(tmp_path.iterdir()) == []
    group.close()
