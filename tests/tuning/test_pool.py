"""Workers that measure stay for the next trial, and what goes wrong in one of them costs that trial alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray.exceptions import GetTimeoutError

from common.errors import ResourceError
from monitoring.sampling.host import memory_of_this_machine
from tests.runs import tiny_config
from tests.tuning.injected_faults import measure_with_faults
from train_config.tune_schema import MeasurementSection
from tuning import pool as measuring_pool
from tuning.pool import MeasuringPool
from tuning.settings import Measurement, Settings

QUICK = MeasurementSection(warmup_steps=1, window_s=0.1, max_windows=1)
HANG_TIMEOUT_S = 5.0
FAULTS = {("prefetch", 2): "nan", ("prefetch", 3): "out_of_memory", ("prefetch", 5): "crash", ("prefetch", 6): "hang"}

pytestmark = pytest.mark.slow


def config_in(folder: Path):
    return tiny_config(folder, ray={"cpus_per_worker": 1})


def assert_measured(result: Measurement) -> None:
    assert result.status == "ok", result.reason
    assert result.tokens_per_s > 0


def loaders() -> list[psutil.Process]:
    """Loader processes of this test session's workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] if "dataset.batches.loader_process" in process.cmdline() else []
        except psutil.Error:  # it has ended
            continue
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def pool(ray_address, store_path, folder) -> Iterator[MeasuringPool]:
    """One for several tests, as starting workers takes about ten seconds."""
    with MeasuringPool(config_in(folder), store_path, trial=functools.partial(measure_with_faults, FAULTS)) as pool:
        yield pool


def test_two_workers_share_the_memory_and_survive_nan_and_out_of_memory_in_one(pool, folder, monkeypatch):
    monkeypatch.setattr(measuring_pool, "GRACE_S", 0.0)  # those that agree need none, on any machine
    settings = Settings.of(config_in(folder), workers=2)
    first = pool.measure(settings, QUICK)
    assert_measured(first)
    assert first.total_memory_bytes == memory_of_this_machine().total // 2

    spoilt = pool.measure(replace(settings, prefetch=2), QUICK)
    assert (spoilt.status, spoilt.reason) == ("nan", "loss or gradient was not finite in step 1")
    assert pool.starts == 1, "workers that ended together stay"

    # On the second worker, inside a step: the first waits for it in a collective operation.
    too_large = pool.measure(replace(settings, prefetch=3), QUICK)
    assert (too_large.status, too_large.agreed) == ("out_of_memory", False)
    assert "injected" in too_large.reason
    assert 0 < too_large.peak_memory_bytes < too_large.total_memory_bytes
    assert list(folder.iterdir()) == []


def test_a_crash_and_a_hang_are_results_and_the_next_trial_has_new_workers(pool, folder):
    settings = replace(Settings.of(config_in(folder), workers=1), num_workers=1)
    assert_measured(pool.measure(settings, QUICK))
    starts = pool.starts
    crashed = pool.measure(replace(settings, prefetch=5), QUICK)
    assert crashed.status == "crash"
    assert "a worker's process ended" in crashed.reason
    assert_measured(pool.measure(settings, QUICK))
    assert pool.starts == starts + 1

    kill, held = pool._group.kill, []
    pool._group.kill = lambda: (held.extend(loaders()), kill())
    hung = pool.measure(replace(settings, prefetch=6), QUICK.model_copy(update={"timeout_s": HANG_TIMEOUT_S}))
    assert (hung.status, hung.reason) == ("timeout", "a worker did not end within 5 s")
    assert hung.seconds >= HANG_TIMEOUT_S
    assert held
    _, alive = psutil.wait_procs(held, timeout=30)
    assert not alive


def test_workers_that_do_not_start_are_no_result(ray_address, store_path, tmp_path, monkeypatch):
    def fail(group) -> None:
        raise GetTimeoutError("no place")

    monkeypatch.setattr(measuring_pool._Group, "connect", fail)
    config = config_in(tmp_path)
    with (
        MeasuringPool(config, store_path) as pool,
        pytest.raises(ResourceError, match="did not start"),
    ):
        pool.measure(Settings.of(config, workers=1), QUICK)


def test_settings_that_can_not_run_are_refused_without_a_worker(ray_address, store_path, tmp_path):
    config = config_in(tmp_path)
    settings = Settings.of(config, workers=1)
    with MeasuringPool(config, store_path) as pool:
        for change, reason in [
            ({"tokens": 300}, "must be a multiple of tokens"),
            ({"precision": "fp16"}, "fp16 needs a GPU"),
            ({"workers": 100}, "ask for at most"),
        ]:
            result = pool.measure(replace(settings, **change), QUICK)
            assert result.status == "refused"
            assert reason in result.reason
        assert pool.starts == 0
