"""What workers sample is found on the port from which Prometheus takes Ray's metrics."""

import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray
import torch

from monitoring.sampling.metric_names import find
from monitoring.sampling.prometheus import PrometheusExporter
from monitoring.sampling.sampler import Sampler

SCRAPE_TIMEOUT_S = 90.0
"""Ray hands metrics on every ten seconds."""
LINE = re.compile(r"(?P<name>\w+)\{(?P<tags>[^}]*)\} (?P<value>\S+)")

Series = dict[tuple[str, str, str], float]
"""Values by name, worker and GPU."""


@ray.remote(num_cpus=0)
class SampledWorker:
    """A worker with a sampler, as a run has it."""

    def begin(self, rank: int, path: str) -> None:
        self.sampler = Sampler(
            Path(path),
            worker=rank,
            device=torch.device("cpu"),
            node=rank == 0,
            interval_s=0.2,
            prometheus=True,
            warn=print,
        )
        self.sampler.note(5, 0, {"tokens_per_s": 1234.0 + rank, "forward_s": 0.5 + rank, "loss": 2.25})
        self.sampler._exporter.export({"gpu/3/util": 87.0, "not/known": 1.0})  # as if there were a GPU
        self.sampler.start()

    def end(self) -> None:
        self.sampler.close()


def scraped(address: str) -> Series:
    """Every series of ours that is on the node's port."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    found: Series = {}
    for line in text.splitlines():
        if line.startswith("ray_esmeray_") and (match := LINE.match(line)):
            tags = dict(re.findall(r'(\w+)="([^"]*)"', match["tags"]))
            assert tags["host"] and tags["SessionName"]  # by which the dashboard selects
            name = match["name"].removeprefix("ray_esmeray_")
            found[name, tags["worker"], tags.get("gpu", "")] = float(match["value"])
    return found


@pytest.mark.slow
def test_figures_of_two_workers_are_on_rays_port(ray_address, tmp_path):
    workers = [SampledWorker.remote() for _ in range(2)]
    ray.get([worker.begin.remote(rank, str(tmp_path / f"{rank}.jsonl")) for rank, worker in enumerate(workers)])
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    expected = {
        ("worker_forward_s", "0", ""): 0.5,
        ("worker_forward_s", "1", ""): 1.5,
        ("perf_tokens_per_s", "0", ""): 1234.0,
        ("train_loss", "0", ""): 2.25,
        ("gpu_util", "0", "3"): 87.0,
    }
    present = {("worker_rss_bytes", "1", ""), ("mem_host_used_bytes", "0", ""), ("cpu_percent", "0", "")}
    deadline = time.monotonic() + SCRAPE_TIMEOUT_S
    found: Series = {}
    while not (expected.keys() | present) <= found.keys() and time.monotonic() < deadline:
        time.sleep(0.5)
        found = scraped(address)
    ray.get([worker.end.remote() for worker in workers])
    assert {key: found.get(key) for key in expected} == expected
    assert all(found[key] > 0 for key in present - {("cpu_percent", "0", "")})
    assert ("perf_tokens_per_s", "1", "") not in found  # it is the whole run's
    assert ("mem_host_used_bytes", "1", "") not in found  # worker 0 looks at the machine


def test_values_that_are_not_finite_and_unknown_names_are_left_out(monkeypatch):
    monkeypatch.setattr("monitoring.sampling.prometheus.ray_is_running", lambda: True)
    exporter = PrometheusExporter(0, "host")
    exporter.export({"perf/tokens_per_s": float("nan"), "perf/unheard_of": 1.0})
    assert exporter._gauges == {}
    assert find("perf/unheard_of") is None
