"""``python -m tools gpu_monitor``: whole samples whatever ends it; without a GPU the machine's own."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from monitoring.gpu_log.columns import COLUMNS, GPU_METRICS
from monitoring.sampling.nvml import GpuSample
from tools import gpu_monitor

ROOT = Path(__file__).parents[2]


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
    figures = {"util_percent": 91.0, "mem_used_bytes": 30 * 2**30, "mem_total_bytes": 80 * 2**30, "power_w": 512.5}
    return Devices(*(GpuSample(index, f"GPU-{index}", "NVIDIA H200", **figures) for index in (0, 1)))  # type: ignore[arg-type]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Devices], Devices]:
    def use(devices: Devices) -> Devices:
        monkeypatch.setattr(gpu_monitor, "NvmlDevices", lambda warn: devices)
        return devices

    return use


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.csv"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_row_for_each_gpu_and_sample_with_the_machine_beside_it(command, use, log):
    devices = use(two_gpus())
    outcome = command("gpu_monitor", "--output", log, "--interval", 0.05, "--duration", 0.12)
    assert outcome.code == 0, outcome.err
    written = rows(log)
    assert [row["gpu"] for row in written] == ["0", "1"] * (devices.reads - 1)  # the first tells which GPUs there are
    assert outcome.out.startswith(f"{devices.reads - 1} samples of 2 GPUs in 0 s: ")
    assert written[0]["power_w"] == "512.5"
    assert float(written[0]["host_total_bytes"]) > 0
    assert 0 <= float(written[-1]["cpu_percent"]) <= 100
    times = [float(row["time"]) for row in written[::2]]
    assert times == sorted(times)
    assert devices.closed


def test_without_a_gpu_rows_are_the_machines_and_that_is_said(command, use, log):
    use(Devices())
    outcome = command("gpu_monitor", "--output", log, "--interval", 0.05, "--duration", 0.1)
    assert outcome.code == 0
    assert "no GPU here" in outcome.err
    assert outcome.err.count("\n") == 1
    for row in rows(log):
        assert all(row[name] == "" for name in ("gpu", *GPU_METRICS))
        assert float(row["host_used_bytes"]) > 0
    analysis = command("analyze_gpu_logs", "--log", log)
    assert (analysis.code, analysis.err) == (3, f"error: {log}: has no GPU, only the machine's own metrics\n")


def test_chosen_gpus_alone_are_logged_and_a_second_call_appends(command, use, log):
    use(two_gpus())
    for _ in range(2):
        assert command("gpu_monitor", "--output", log, "--duration", 0.01, "--gpu", 1).code == 0
    assert [row["gpu"] for row in rows(log)] == ["1", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", 7), "--gpu 7: not on this machine; there are: 0, 1"),
        (("--pid", 2**22 + 1), "there is no such process"),
        (("--interval", 0.001), "--interval: input should be greater than or equal to 0.05, got 0.001"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(command, use, log, arguments, message):
    use(two_gpus())
    outcome = command("gpu_monitor", "--output", log, "--duration", 1, *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not log.exists()


def test_watched_process_is_measured_with_its_children_and_ends_the_log(command, use, log):
    use(two_gpus())
    child = "import time; held = bytearray(60 << 20); time.sleep({})"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child.format(2)!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent])
    assert command("gpu_monitor", "--output", log, "--interval", 0.1, "--pid", process.pid).code == 0
    process.wait()
    most = max(float(row["watched_rss_bytes"]) for row in rows(log))
    assert most > 60 << 20
    assert any(row["watched_cpu_percent"] for row in rows(log))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signal_leaves_whole_rows_and_a_summary(log, number, code):
    process = subprocess.Popen(
        [sys.executable, "-m", "tools", "gpu_monitor", "--output", str(log), "--interval", "0.05"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") >= 4):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == code
    data = log.read_bytes()
    assert data.endswith(b"\n")
    assert {line.count(b",") for line in data.splitlines()} == {len(COLUMNS) - 1}
    assert f"{data.count(bytes([10])) - 1:,} samples of " in out


def test_live_line_is_kept_on_a_terminal(command, use, log, monkeypatch):
    use(two_gpus())
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(gpu_monitor, "Console", lambda: terminal)
    assert command("gpu_monitor", "--output", log, "--duration", 0.01).code == 0
    shown = terminal.file.getvalue()
    assert "1 sample · GPU 0 91 % 512 W 30.0 GiB" in shown and "Ctrl-C ends" in shown
