"""Host metrics equal psutil's and the cgroup's; a worker's metrics are sums over its child processes."""

import subprocess
import sys
from collections import namedtuple

import psutil
import pytest

from esmeray.common import processor
from esmeray.monitoring.sampling.host import HostSampler, Memory, ProcessSampler, memory_of_this_machine

HELD_BYTES = 64 << 20
HOLD = f"import sys; held = b'x' * {HELD_BYTES}; print('held', flush=True); sys.stdin.read()"
GIB = 1 << 30
Bytes = namedtuple("Bytes", "read_bytes write_bytes")
Traffic = namedtuple("Traffic", "bytes_sent bytes_recv")


def test_resident_memory_of_a_worker_includes_its_loaders():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], text=True, **pipes) as loader:
        assert loader.stdout is not None and loader.stdout.readline() == "held\n"
        with_loader = ProcessSampler().read()["rss_bytes"]
        alone = psutil.Process().memory_info().rss
    assert with_loader - alone > HELD_BYTES


def test_disk_and_network_are_rates_between_readings(monkeypatch):
    now, disk, net = 10.0, Bytes(1000, 2000), Traffic(300, 400)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: {"one": disk})
    monkeypatch.setattr(psutil, "net_io_counters", lambda: net)
    sampler = HostSampler(clock=lambda: now)
    first = sampler.read()
    assert not [name for name in first if "per_s" in name]
    assert first["host/mem_used_bytes"] + first["host/mem_available_bytes"] == first["host/mem_total_bytes"]
    now, disk, net = 12.0, Bytes(1500, 2000), Traffic(100, 500)  # the counter of sent bytes was reset
    rates = {name: value for name, value in sampler.read().items() if "per_s" in name}
    assert rates == {
        "host/disk_read_bytes_per_s": 250.0,
        "host/disk_write_bytes_per_s": 0.0,
        "host/net_received_bytes_per_s": 50.0,
    }


STAT = f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}"
OLD_STAT = f"inactive_file 1\ntotal_inactive_file {GIB + GIB // 2}\ntotal_active_file 0"
OLD_GROUPS = "5:devices:/\n4:memory:/job\n0::/"
LIMITS = {
    "a looser one": ("0::/", {"": {"max": 100 * GIB, "current": 0}}, Memory(8 * GIB, 6 * GIB)),
    "a tighter one": ("0::/", {"": {"max": 2 * GIB, "current": GIB, "stat": STAT}}, Memory(2 * GIB, GIB + GIB // 2)),
    "of the older cgroups": (
        OLD_GROUPS,
        {"memory/job": {"limit_in_bytes": GIB, "usage_in_bytes": 2 * GIB, "stat": OLD_STAT}},
        Memory(GIB, GIB // 2),
    ),
    "of the group above": (
        "0::/slice/job",
        {"slice/job": {"max": "max", "current": 5}, "slice": {"max": 4 * GIB, "current": 3 * GIB}},
        Memory(4 * GIB, GIB),
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_a_container_count(tmp_path, monkeypatch, limit):
    """The machine has 8 GiB, 6 of them available."""
    groups, folders, memory = LIMITS[limit]
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "group")
    monkeypatch.setattr(processor, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(8 * GIB, 6 * GIB))
    (tmp_path / "group").write_text(f"{groups}\n")
    for folder, files in folders.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "cgroup" / folder / f"memory.{name}").write_text(f"{content}\n")
    assert memory_of_this_machine() == memory
