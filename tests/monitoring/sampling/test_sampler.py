"""A worker's samples contain all readable metrics and are on Ray's port; failures never affect the run."""

import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
from prometheus_client.parser import text_string_to_metric_families

from esmeray.monitoring.sampling import sampler as sampler_module
from esmeray.monitoring.sampling.metric_names import find
from esmeray.monitoring.sampling.nvml import GpuSample
from esmeray.monitoring.sampling.sampler import Sampler
from esmeray.run_folder.metrics_log import Record, read_metrics

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
NEVER_S = 1e6
STEP = {"loss": 2.5, "tokens": 4000, "tokens_per_s": 1000.0, "step_s": 4.0, "forward_s": 1.0, "padding_share": 0.03}
STEP |= {"loader_queue_depth": 2, "feature_cache_hit_rate": 0.75}


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "monitoring" / "worker-00003.jsonl"


@pytest.fixture
def make(path, warnings) -> Callable[..., Sampler]:
    own = {"path": path, "worker": 3, "device": CPU, "warn": warnings.append}
    return partial(Sampler, **{"node": False, "interval_s": NEVER_S, **own})


@pytest.fixture
def cuda(monkeypatch) -> SimpleNamespace:
    """Simulated torch.cuda with a settable peak memory."""
    gpu = SimpleNamespace(peak=900)
    counts = {"allocated_bytes.all.current": 600, "reserved_bytes.all.current": 800, "num_alloc_retries": 4}
    stats = {GPU: lambda: counts | {"allocated_bytes.all.peak": gpu.peak}}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats[device]())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(gpu, "peak", 600))
    return gpu


def only_sample(path: Path) -> Record:
    (record,) = read_metrics(path)
    return record


def test_a_sample_has_the_process_and_the_last_noted_step(make, path, warnings):
    sampler = make(clock=lambda: 1234.5)
    sampler.note(7, 1, STEP)
    sampler.note(8, 1, STEP)
    sampler.sample()
    record = only_sample(path)
    values = record["metrics"]
    assert {"kind": "sample", "step": 8, "epoch": 1, "time": 1234.5, "worker": 3}.items() <= record.items()
    assert values["host/worker/3/rss_bytes"] > 10 << 20
    assert values["throughput/worker/3/forward_s"] == 1.0
    assert [values[f"data/worker/3/{name}"] for name in ("loader_queue_depth", "feature_cache_hit_rate")] == [2, 0.75]
    assert all(find(name) is not None and "/worker/3/" in name for name in values)
    assert warnings == []
    path.unlink()
    sampler = make(worker=0, flops_per_token=2e9, peak_tflops=20.0)
    sampler.note(8, 1, STEP)
    sampler.sample()
    of_run = {
        "throughput/tokens_per_s": 1000.0,
        "throughput/step_s": 4.0,
        "data/padding_share": 0.03,
        "train/loss": 2.5,
    }
    of_run["throughput/mfu"] = pytest.approx(0.1)
    values = only_sample(path)["metrics"]
    assert {name: value for name, value in values.items() if "/worker/" not in name} == of_run


def test_memory_is_of_the_workers_gpu_with_its_peak_per_epoch(make, path, cuda):
    sampler = make(device=GPU)
    sampler.note(1, 0, STEP)
    sampler.sample()
    values = only_sample(path)["metrics"]
    torch_values = {
        name.removeprefix("gpu/worker/3/torch_"): value for name, value in values.items() if "torch" in name
    }
    counted = {"allocated_bytes": 600, "reserved_bytes": 800, "peak_bytes": 900, "alloc_retries": 4}
    assert torch_values == {**counted, "fragmentation": pytest.approx(0.25)}
    cuda.peak = 1500  # after the sample, before the epoch ends
    sampler.note(2, 1, STEP)  # the epoch's last step: the run would resume at the next epoch
    sampler.new_epoch()
    sampler.sample()
    sampler.note(3, 1, STEP)
    sampler.new_epoch()
    sampler.sample()
    peaks = [(record["epoch"], record["metrics"]["gpu/worker/3/torch_peak_bytes"]) for record in read_metrics(path)]
    assert peaks == [(0, 900), (0, 1500), (1, 600), (1, 600), (1, 600)]


def test_disk_that_can_not_be_written_is_one_warning_and_is_tried_again(make, path, warnings):
    path.parent.parent.mkdir()
    path.parent.write_text("a file where the folder should be")
    sampler = make()
    for _ in range(3):
        sampler.sample()
    (warning,) = warnings
    assert "file of samples" in warning and str(path.parent) in warning
    path.parent.unlink()
    sampler.sample()
    assert only_sample(path)["kind"] == "sample"


def test_a_source_that_fails_is_one_warning_and_the_others_are_sampled(make, path, monkeypatch, warnings):
    def fail(process: psutil.Process) -> None:
        raise psutil.AccessDenied(1)

    gpus = [GpuSample(index, f"GPU-{index}", {"util": 50.0 + index, "power_w": 300.0}) for index in (0, 1)]
    closed = []
    devices = SimpleNamespace(read=lambda: gpus, close=lambda: closed.append(True))
    monkeypatch.setattr(sampler_module, "NvmlDevices", lambda warn: devices)
    monkeypatch.setattr(sampler_module.ProcessSampler, "read", fail)
    sampler = make(node=True)
    sampler.note(1, 0, STEP)
    sampler.start().close()
    assert closed == [True] and len(warnings) == 1 and "AccessDenied" in warnings[0]
    records = read_metrics(path)
    assert [r["message"] for r in records if r["kind"] == "event"] == [f"worker 3: {warnings[0]}"]
    values = records[-1]["metrics"]
    gpu_values = {"gpu/0/util": 50.0, "gpu/0/power_w": 300.0, "gpu/1/util": 51.0, "gpu/1/power_w": 300.0}
    assert {name: value for name, value in values.items() if name.startswith("gpu/")} == gpu_values
    assert values["host/mem_total_bytes"] > values["host/mem_available_bytes"]
    assert values["throughput/worker/3/step_s"] == 4.0 and "host/worker/3/rss_bytes" not in values
    assert all(find(name) is not None for name in values)


def test_driver_that_hangs_does_not_hold_up_the_end(make, monkeypatch, warnings):
    hanging, released = threading.Event(), threading.Event()

    def hang(warn: Callable[[str], None]) -> None:
        hanging.set()
        released.wait(60)

    monkeypatch.setattr(sampler_module, "NvmlDevices", hang)
    monkeypatch.setattr(sampler_module, "CLOSE_LIMIT_S", 0.05)
    sampler = make(node=True).start()
    assert hanging.wait(30)
    sampler.close()
    assert "hangs" in warnings[0]
    released.set()
    sampler._thread.join(30)


SCRAPE_TIMEOUT_S = 90.0
"""Seconds to wait for metrics; Ray exports them every ten seconds."""


def scraped(address: str) -> dict[tuple[str, str, str], float]:
    """Esmeray's values on the node's metrics port, by name, worker and GPU."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("ray_esmeray_"):
            assert sample.labels["host"] and sample.labels["SessionName"]  # the dashboard selects by these labels
            name = sample.name.removeprefix("ray_esmeray_")
            samples[name, sample.labels["worker"], sample.labels.get("gpu", "")] = sample.value
    return samples


@pytest.mark.slow
def test_figures_of_two_workers_are_on_rays_port(ray_address, make):
    workers = []
    for rank in range(2):
        sampler = make(worker=rank, node=rank == 0, interval_s=0.2)
        sampler.note(5, 0, {"tokens_per_s": 1234.0 + rank, "forward_s": 0.5 + rank, "loss": 2.25})
        as_if_of_a_gpu = {"gpu/3/util": 87.0, "not/known": 1.0, "throughput/mfu": float("nan")}
        sampler._export(as_if_of_a_gpu)
        workers.append(sampler.start())
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    expected = {
        ("throughput_worker_forward_s", "0", ""): 0.5,
        ("throughput_worker_forward_s", "1", ""): 1.5,
        ("throughput_tokens_per_s", "0", ""): 1234.0,
        ("train_loss", "0", ""): 2.25,
        ("gpu_util", "0", "3"): 87.0,
    }
    present = {("host_worker_rss_bytes", "1", ""), ("host_mem_used_bytes", "0", ""), ("host_cpu_percent", "0", "")}
    deadline = time.monotonic() + SCRAPE_TIMEOUT_S
    samples = {}
    while not (expected.keys() | present) <= samples.keys() and time.monotonic() < deadline:
        time.sleep(0.5)
        samples = scraped(address)
    for sampler in workers:
        sampler.close()
    assert {key: samples.get(key) for key in expected} == expected
    assert all(samples[key] > 0 for key in present - {("host_cpu_percent", "0", "")})
    assert not {"not_known", "perf_mfu"} & {name for name, *_ in samples}
    assert ("throughput_tokens_per_s", "1", "") not in samples  # a metric of the whole run
    assert ("host_mem_used_bytes", "1", "") not in samples  # worker 0 reads the machine's metrics
