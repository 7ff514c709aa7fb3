"""A process without progress ends in time and saves its stacks; a process with progress continues."""

import signal
import subprocess
import sys
import time

import pytest

from esmeray.training.engine import watchdog
from esmeray.training.engine.watchdog import Watchdog, left_stacks, set_stacks_aside

pytestmark = pytest.mark.slow

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
from esmeray.training.engine import watchdog
watchdog.GRACE_S, watchdog.LONGER = 0.5, 3
dog = watchdog.Watchdog(Path(sys.argv[1]), 0, 1.0)
time.sleep(1.5)
dog.stepped()
for _ in range(4):
    time.sleep(0.5)
    dog.progress()
print("hangs", flush=True)
{hang}  # the line
"""


def test_watchdog_ends_a_hung_worker_and_logs_its_stack(tmp_path):
    """One worker waits, another holds the GIL; both hang at the same time to save time."""
    hung = []
    for name, hang in {"waits": "time.sleep(600)", "holds the GIL": "ctypes.PyDLL(None).sleep(600)"}.items():
        (folder := tmp_path / name).mkdir()
        (folder / "script.py").write_text(SCRIPT.format(hang=hang))
        process = subprocess.Popen([sys.executable, folder / "script.py", folder], stdout=subprocess.PIPE, text=True)
        hung.append((folder, process))
    for folder, process in hung:
        assert process.stdout is not None and process.stdout.readline() == "hangs\n", "it had progress"
        begun = time.monotonic()
        assert process.wait(60) == -signal.SIGALRM
        assert time.monotonic() - begun < 1 + 10
        (stacks,) = left_stacks(folder)
        line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "the line" in text)
        assert f'"{folder / "script.py"}", line {line} in <module>' in stacks.read_text()
        assert set_stacks_aside(folder) == folder / "hung-1"
        assert (folder / "hung-1" / stacks.name).exists()
        assert left_stacks(folder) == []


def test_closed_watchdog_lets_its_process_live_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_S", 0.1)
    dog = Watchdog(tmp_path, 0, 0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["stacks-0.txt"]
    dog.stepped()
    dog.close()
    dog.close()
    time.sleep(0.3)
    assert not [*tmp_path.iterdir()]
    Watchdog(tmp_path, 0, None).progress()
