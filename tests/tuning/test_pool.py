"""Workers that measure stay for the next trial, and what goes wrong in one of them costs that trial alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import suppress
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
from tuning.pool import MeasuringPool, _limited
from tuning.settings import Measurement, Settings

QUICK = MeasurementSection(warmup_steps=1, window_s=0.1, max_windows=2)
HANG_TIMEOUT_S = 8.0
MIB = 2**20

pytestmark = pytest.mark.slow


def config_in(folder, **changes):
    return tiny_config(folder, ray={"cpus_per_worker": 1}, **changes)


class LoadersSeen(threading.Thread):
    """Looks for the loader processes of this test session's workers, as long as the block lasts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.processes: set[psutil.Process] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "dataset.batches.loader_process" in process.cmdline():
                        self.processes.add(process)

    def __enter__(self) -> LoadersSeen:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def assert_measured(result: Measurement) -> None:
    assert result.status == "ok", result.reason
    assert result.tokens_per_s > 0


FAULTS = {("prefetch", 2): "nan", ("prefetch", 3): "out_of_memory", ("prefetch", 5): "crash", ("prefetch", 6): "hang"}


@pytest.fixture
def no_grace(monkeypatch) -> None:
    """The time that others have to end after one broke off by itself: those that agree need none, on any machine."""
    monkeypatch.setattr(measuring_pool, "GRACE_S", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the shared pool's run."""
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def pool(ray_address, store_path, folder) -> Iterator[MeasuringPool]:
    """One for several tests, as starting workers takes about ten seconds. Whatever a trial left, the next one works."""
    with MeasuringPool(config_in(folder), store_path, trial=functools.partial(measure_with_faults, FAULTS)) as pool:
        yield pool


def sound(folder: Path, workers: int) -> Settings:
    return Settings.of(config_in(folder), workers)


def test_two_workers_survive_nan_and_memory_that_runs_out_in_one(pool, folder, no_grace):
    settings = sound(folder, workers=2)
    pool.start(workers=2)
    starts = pool.starts
    assert_measured(pool.measure(settings, QUICK))

    spoilt = pool.measure(replace(settings, prefetch=2), QUICK)
    assert (spoilt.status, spoilt.reason) == ("nan", "loss or gradient was not finite in step 1")
    assert_measured(pool.measure(settings, QUICK))
    assert pool.starts == starts, "workers that ended together go on"

    # On the second worker, inside a step: the first waits for it in a collective operation.
    too_large = pool.measure(replace(settings, prefetch=3), QUICK)
    assert (too_large.status, too_large.agreed) == ("out_of_memory", False)
    assert "injected" in too_large.reason
    assert 0 < too_large.peak_memory_bytes < too_large.total_memory_bytes
    assert_measured(pool.measure(settings, QUICK))
    assert pool.starts == starts + 1
    assert list(folder.iterdir()) == []


def test_crashed_workers_are_started_anew_as_are_others_in_number(pool, folder):
    pool.start(workers=2)
    starts = pool.starts
    crashed = pool.measure(replace(sound(folder, workers=2), prefetch=5), QUICK)
    assert crashed.status == "crash"
    assert "a worker's process ended" in crashed.reason
    assert_measured(pool.measure(sound(folder, workers=1), QUICK))
    assert pool.starts == starts + 1


def test_hang_ends_at_the_timeout_and_takes_its_processes_along(pool, folder):
    settings = replace(sound(folder, workers=1), num_workers=1)
    pool.start(workers=1)
    starts = pool.starts
    with LoadersSeen() as loaders:
        hung = pool.measure(replace(settings, prefetch=6), QUICK.model_copy(update={"timeout_s": HANG_TIMEOUT_S}))
        assert (hung.status, hung.reason) == ("timeout", "no worker ended within 8 s")
        assert hung.seconds >= HANG_TIMEOUT_S
        assert_measured(pool.measure(settings, QUICK))
        assert pool.starts == starts + 1
    assert loaders.processes
    _, alive = psutil.wait_procs(loaders.processes, timeout=10)
    assert not alive


def test_memory_of_a_large_trial_does_not_count_for_the_next(ray_address, store_path, tmp_path):
    config = config_in(tmp_path, model={"backbone": {"layers": 2, "hidden_size": 128, "heads": 4}})
    small = Settings.of(config, workers=1)
    with MeasuringPool(config, store_path, keep_global_tokens=False) as pool:
        first = pool.measure(small, QUICK)
        large = pool.measure(replace(small, tokens=8192), QUICK)
        again = pool.measure(small, QUICK)
        assert large.peak_memory_bytes - first.peak_memory_bytes > 40 * MIB
        assert again.peak_memory_bytes == pytest.approx(first.peak_memory_bytes, abs=15 * MIB)
        assert pool.starts == 1


def test_workers_agree_on_memory_beyond_the_limit_and_stay(ray_address, store_path, tmp_path, no_grace):
    config = config_in(tmp_path, training={"cpu_memory_limit_mib": 64})  # less than Python and torch alone
    with MeasuringPool(config, store_path) as pool:
        result = pool.measure(Settings.of(config, workers=2), QUICK)
        assert (result.status, result.agreed) == ("out_of_memory", True)
        assert "64 MiB is what it may take" in result.reason
        assert result.total_memory_bytes == 64 * MIB < result.peak_memory_bytes
        assert pool.measure(Settings.of(config, workers=2), QUICK).status == "out_of_memory"
        assert pool.starts == 1


def test_workers_that_do_not_start_are_no_result(ray_address, store_path, tmp_path, monkeypatch):
    def fail(group) -> None:
        raise GetTimeoutError("no place")

    monkeypatch.setattr(measuring_pool._Group, "connect", fail)
    config = config_in(tmp_path)
    with MeasuringPool(config, store_path) as pool:
        with pytest.raises(ResourceError, match="did not start: is the cluster busy"):
            pool.start(1)
        with pytest.raises(ResourceError, match="did not start"):
            pool.measure(Settings.of(config, workers=1), QUICK)
        assert pool._group is None, "nothing half made is used again"


def test_settings_that_can_not_run_are_refused_without_a_worker(ray_address, store_path, tmp_path):
    config = config_in(tmp_path)
    settings = Settings.of(config, workers=1)
    with MeasuringPool(config, store_path) as pool:
        for change, reason in [
            ({"tokens": 300}, "must be a multiple of tokens"),
            ({"tokens": 32}, "can't hold one sequence"),
            ({"amp_dtype": "fp16"}, "fp16 needs a GPU"),
            ({"workers": 100}, "ask for at most"),
        ]:
            result = pool.measure(replace(settings, **change), QUICK)
            assert result.status == "refused"
            assert reason in result.reason
        assert pool.starts == 0


def test_workers_of_a_machine_share_its_memory(tmp_path):
    assert _limited(config_in(tmp_path), 2).training.cpu_memory_limit_mib == memory_of_this_machine().total / 2 / MIB
    limited = config_in(tmp_path, training={"cpu_memory_limit_mib": 900})
    assert _limited(limited, 2).training.cpu_memory_limit_mib == 900
