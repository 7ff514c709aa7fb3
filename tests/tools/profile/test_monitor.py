"""``esmeray profile monitor``: whole samples whatever ends it."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monitoring.gpu_log import recording
from monitoring.gpu_log.columns import COLUMNS
from monitoring.sampling.nvml import GpuSample

ROOT = Path(__file__).parents[3]
TWO_GPUS = """
from monitoring.gpu_log import recording
from tests.tools.profile.test_monitor import Devices, two_gpus
recording.NvmlDevices = lambda warn: two_gpus()
from tools.__main__ import entry_point
entry_point()
"""


class Devices:
    """NVML with GPUs that answer as told."""

    def __init__(self, *samples: GpuSample) -> None:
        self.samples = list(samples)
        self.reads = 0
        self.closed = False

    def read(self) -> list[GpuSample]:
        self.reads += 1
        return self.samples

    def close(self) -> None:
        self.closed = True


def two_gpus() -> Devices:
    values = {"util_percent": 91.0, "mem_used_bytes": 30 * 2**30, "mem_total_bytes": 80 * 2**30, "power_w": 512.5}
    return Devices(*(GpuSample(index, f"GPU-{index}", "NVIDIA H200", **values) for index in (0, 1)))  # type: ignore[arg-type]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Devices], Devices]:
    def use(devices: Devices) -> Devices:
        monkeypatch.setattr(recording, "NvmlDevices", lambda warn: devices)
        return devices

    return use


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.csv"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, skipinitialspace=True))


def test_each_gpu_has_a_row_in_each_sample(command, use, log):
    devices = use(two_gpus())
    outcome = command("profile", "monitor", "--output", log, "--interval", 0.05, "--duration", 0.12)
    assert outcome.code == 0, outcome.err
    written = rows(log)
    assert [row["index"] for row in written] == ["0", "1"] * (devices.reads - 1)  # the first says which GPUs there are
    assert outcome.out.startswith(f"{devices.reads - 1} samples: ")
    assert written[0]["power.draw [W]"] == "512.50 W"
    times = [row["timestamp"] for row in written[::2]]
    assert times == sorted(times)
    assert devices.closed


def test_chosen_gpus_alone_are_logged_and_a_second_call_appends(command, use, log):
    use(two_gpus())
    for _ in range(2):
        assert command("profile", "monitor", "--output", log, "--duration", 0.01, "--gpu", 1).code == 0
    assert [row["index"] for row in rows(log)] == ["1", "1"]


@pytest.mark.parametrize(
    ("devices", "arguments", "code", "message"),
    [
        (two_gpus(), ("--gpu", 7), 2, "GPU 7 is not on this machine; there are: [0, 1]"),
        (two_gpus(), ("--interval", 0.001), 2, "--interval: input should be greater than or equal to 0.05, got 0.001"),
        (Devices(), (), 4, "no GPU to record"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(command, use, log, devices, arguments, code, message):
    use(devices)
    outcome = command("profile", "monitor", "--output", log, "--duration", 1, *arguments)
    assert outcome.code == code
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not log.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signal_leaves_whole_rows(log, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_GPUS, "profile", "monitor", "--output", str(log), "--interval", "0.05"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    data = log.read_bytes()
    assert data.endswith(b"\n")
    assert {line.count(b",") for line in data.splitlines()} == {len(COLUMNS) - 1}
