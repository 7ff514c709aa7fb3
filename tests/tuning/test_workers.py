"""Workers that measure stay for the next trial, and what goes wrong in one of them is a result."""

from dataclasses import replace

import pytest

from esmeray.cluster.placement import Workers
from esmeray.monitoring.sampling.host import memory_of_this_machine
from esmeray.tuning import workers as module
from esmeray.tuning.records import Job
from esmeray.tuning.section import TuneConfig
from tests.runs import tiny_config
from tests.tuning.injected_faults import a_group

QUICK = TuneConfig.model_validate({"measurement": {"warmup_steps": 1, "window_s": 0.1, "max_windows": 1}})
FAULTS = {("data.prefetch", 2): "nan", ("data.prefetch", 3): "out_of_memory"}

pytestmark = pytest.mark.slow


def test_two_workers_share_the_memory_and_survive_nan_and_out_of_memory_in_one(
    ray_address, store_path, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "GRACE_S", 0.0)  # those that agree need none, on any machine
    workers = Workers(2, 1, use_gpu=False)
    job = Job(tiny_config(tmp_path, ray={"num_workers": 2}), QUICK, store_path=str(store_path))
    group = a_group(FAULTS, workers, job)

    def measured(prefetch: int):
        return group.measure(replace(job.own_settings(workers), prefetch=prefetch), None)

    first = measured(4)
    assert first.status == "ok", first.reason
    assert first.tokens_per_s > 0
    assert first.total_memory_bytes == memory_of_this_machine().total // 2

    spoilt = measured(2)
    assert (spoilt.status, spoilt.reason) == ("nan", "loss or gradient was not finite in step 1")
    assert spoilt.reusable, "workers that ended together stay"
    assert measured(4).status == "ok"

    # On the second worker, inside a step: the first waits for it in a collective operation.
    too_large = measured(3)
    assert (too_large.status, too_large.reusable) == ("out_of_memory", False)
    assert "injected" in too_large.reason
    assert 0 < too_large.peak_memory_bytes < too_large.total_memory_bytes
    assert list(tmp_path.iterdir()) == []
    group.close()
