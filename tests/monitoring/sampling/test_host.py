"""Host metrics are those of psutil and the cgroup; a worker's are summed over what it started."""

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from esmeray.monitoring.sampling import host
from esmeray.monitoring.sampling.host import HostSampler, Memory, ProcessSampler, memory_of_this_machine

HELD_BYTES = 64 << 20
HOLD = f"import sys; held = b'x' * {HELD_BYTES}; print('held', flush=True); sys.stdin.read()"
GIB = 1 << 30
Bytes = namedtuple("Bytes", "read_bytes write_bytes")
Traffic = namedtuple("Traffic", "bytes_sent bytes_recv")


@pytest.fixture
def cgroups(tmp_path, monkeypatch) -> Path:
    """A machine with 8 GiB, 6 of them available, and no cgroup yet."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    monkeypatch.setattr(host, "_PROC", proc)
    monkeypatch.setattr(host, "_CGROUPS", groups)
    machine = namedtuple("machine", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine(8 * GIB, 6 * GIB))
    return tmp_path


def write_limits(machine: Path, groups: str, folder: Path, **files: object) -> None:
    """Put this process into these groups, and the memory's files into the folder of one."""
    (machine / "proc" / "self" / "cgroup").write_text(f"{groups}\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_resident_memory_of_a_worker_includes_its_loaders():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], text=True, **pipes) as loader:
        assert loader.stdout is not None and loader.stdout.readline() == "held\n"
        with_loader = ProcessSampler().read()["rss_bytes"]
        alone = psutil.Process().memory_info().rss
    assert with_loader - alone > HELD_BYTES


def test_cpu_of_a_worker_is_the_growth_of_its_cpu_time(monkeypatch):
    now, used = 100.0, 5.0
    times = namedtuple("times", "user system")
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda process: times(used, 1.0))
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])  # other tests may have started some
    sampler = ProcessSampler(clock=lambda: now)
    assert "cpu_percent" not in sampler.read()  # nothing to compare with
    now, used = 104.0, 11.0
    assert sampler.read()["cpu_percent"] == pytest.approx(150.0)


def test_disk_and_network_are_rates_between_readings(monkeypatch):
    now, disk, net = 10.0, Bytes(1000, 2000), Traffic(300, 400)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: {"one": disk})
    monkeypatch.setattr(psutil, "net_io_counters", lambda: net)
    sampler = HostSampler(clock=lambda: now)
    first = sampler.read()
    assert not [name for name in first if "per_s" in name]
    assert first["mem/host_used_bytes"] + first["mem/host_available_bytes"] == first["mem/host_total_bytes"]
    now, disk, net = 12.0, Bytes(1500, 2000), Traffic(100, 500)  # the network's counter of sent bytes began anew
    rates = {name: value for name, value in sampler.read().items() if "per_s" in name}
    assert rates == {"disk/read_bytes_per_s": 250.0, "disk/write_bytes_per_s": 0.0, "net/received_bytes_per_s": 50.0}


STAT = f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}"
OLD_STAT = f"inactive_file 1\ntotal_inactive_file {GIB + GIB // 2}\ntotal_active_file 0"
LIMITS = {
    "a looser one": ("0::/", {"max": 100 * GIB, "current": 0}, Memory(8 * GIB, 6 * GIB)),
    "a tighter one": ("0::/", {"max": 2 * GIB, "current": GIB, "stat": STAT}, Memory(2 * GIB, GIB + GIB // 2)),
    "of the older cgroups": (
        "5:devices:/\n4:memory:/job\n0::/",
        {"limit_in_bytes": GIB, "usage_in_bytes": 2 * GIB, "stat": OLD_STAT},
        Memory(GIB, GIB // 2),
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_a_container_count(cgroups, limit):
    groups, files, memory = LIMITS[limit]
    folder = cgroups / "cgroup" / ("memory/job" if "older" in limit else "")
    write_limits(cgroups, groups, folder, **files)
    assert memory_of_this_machine() == memory


def test_limit_of_a_group_above_counts_too(cgroups):
    above = cgroups / "cgroup" / "slice"
    write_limits(cgroups, "0::/slice/job", above / "job", max="max", current=5)
    write_limits(cgroups, "0::/slice/job", above, max=4 * GIB, current=3 * GIB)
    assert memory_of_this_machine() == Memory(4 * GIB, GIB)
