"""CPU quotas limit the number of cores, whichever cgroup around this process sets them."""

import os
from pathlib import Path

import pytest

from esmeray.common import processor
from esmeray.common.processor import usable_cpus

V1 = "5:memory:/other\n4:cpu,cpuacct:/slurm/job_7\n1:name=systemd:/\n0::/"
PERIOD = {"cpu.cfs_period_us": 100_000}
MACHINES = {
    "none": ("0::/", {"": {}}, 8),
    "v2": ("0::/", {"": {"cpu.max": "300000 100000"}}, 3),
    "v2 without a quota": ("0::/", {"": {"cpu.max": "max 100000"}}, 8),
    "half a core": ("0::/", {"": {"cpu.max": "50000 100000"}}, 1),
    "a core and a half": ("0::/", {"": {"cpu.max": "150000 100000"}}, 1),
    "more than the machine has": ("0::/", {"": {"cpu.max": "6400000 100000"}}, 8),
    "of the group above": (
        "0::/system.slice/job.scope",
        {"system.slice/job.scope": {"cpu.max": "max 100000"}, "system.slice": {"cpu.max": "200000 100000"}},
        2,
    ),
    "the tightest of several": (
        "0::/a/b",
        {"a/b": {"cpu.max": "400000 100000"}, "a": {"cpu.max": "200000 100000"}, "": {"cpu.max": "600000 100000"}},
        2,
    ),
    "v1": (V1, {"cpu/slurm/job_7": {"cpu.cfs_quota_us": 400_000, **PERIOD}}, 4),
    "v1 without a quota": (V1, {"cpu/slurm/job_7": {"cpu.cfs_quota_us": -1, **PERIOD}}, 8),
    "v1, of the group above": (
        V1,
        {
            "cpu/slurm/job_7": {"cpu.cfs_quota_us": -1, **PERIOD},
            "cpu/slurm": {"cpu.cfs_quota_us": 250_000, **PERIOD},
        },
        2,
    ),
    "hybrid": (V1, {"cpu/slurm/job_7": {"cpu.cfs_quota_us": 200_000, **PERIOD}, "unified": {"cpu.max": "1 1"}}, 2),
    "a container that sees its own group as the root": (
        "2:cpu:/docker/3f",
        {"cpu": {"cpu.cfs_quota_us": 100_000, **PERIOD}},
        1,
    ),
    "damaged": ("0::/", {"": {"cpu.max": "much"}}, 8),
    "of no period": ("0::/", {"": {"cpu.max": "100 0"}}, 8),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_tightest_quota_is_the_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str):
    """The machine has eight cores."""
    groups, folders, expected = MACHINES[machine]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "group")
    monkeypatch.setattr(processor, "CGROUPS", tmp_path / "cgroup")
    assert usable_cpus() == 8, "a system without cgroups"
    (tmp_path / "group").write_text(f"{groups}\n")
    for folder, files in folders.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "cgroup" / folder / name).write_text(f"{content}\n")
    assert usable_cpus() == expected
    if os.geteuid() != 0 and machine == "v2":
        (tmp_path / "cgroup" / "cpu.max").chmod(0)
        assert usable_cpus() == 8, "what can't be read is no quota"
