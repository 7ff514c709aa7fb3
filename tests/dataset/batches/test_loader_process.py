"""A loader process answers in order, ends with its worker, survives Ctrl-C, and reports what went wrong."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.batches.loader_process import LoaderProcess, LoaderProcessLost
from esmeray.dataset.batches.preparation import PreparationSettings, prepare_batch
from esmeray.dataset.store.reader import Store
from esmeray.tasks.masked_lm.section import MaskedLMSection

SETTINGS = PreparationSettings(200, 1, True, MaskedLMSection())
DEADLINE_S = 20.0

WORKER = """
import sys, time
from functools import partial
import numpy as np
from esmeray.dataset.batches.loader_process import LoaderProcess
from esmeray.dataset.batches.preparation import PreparationSettings, prepare_batch
from esmeray.dataset.store.reader import Store

process = LoaderProcess(partial(prepare_batch, Store(sys.argv[1]), PreparationSettings(200, 1, True, None)))
process.request(0, np.arange(5))
process.reply()
for _ in range(200):
    process.request(0, np.arange(100))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def process(small_store):
    process = LoaderProcess(partial(prepare_batch, Store(small_store), SETTINGS))
    yield process
    process.close()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for_end(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_fault_of_the_program_arrives_with_its_traceback_and_the_next_batch_after_it(process):
    process.request(0, np.array([10_000]))
    process.request(0, np.array([1]))
    with pytest.raises(RuntimeError, match=r"in a loader process:\nTraceback[\s\S]*IndexError"):
        process.reply()
    assert process.reply().cu_seqlens.size == 2


def test_killed_process_is_reported_with_its_signal(process):
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LoaderProcessLost, match=r"was killed by signal 9; out of memory\?"):
        process.reply()
    process.next_reply()
    with pytest.raises(LoaderProcessLost):
        for _ in range(100):
            process.request(0, np.arange(100))


def test_ctrl_c_does_not_end_the_process(process):
    assert os.getpgid(process.pid) != os.getpgrp()  # so a terminal's Ctrl-C misses it, from its start on
    for _ in range(5):
        process.request(0, np.array([0]))
        process.reply()
        os.kill(process.pid, signal.SIGINT)


def test_process_that_nobody_refers_to_ends(small_store):
    process = LoaderProcess(partial(prepare_batch, Store(small_store), SETTINGS))
    pid = process.pid
    del process
    assert not is_running(pid)


def test_killed_worker_leaves_no_loader_process_even_when_a_child_of_its_holds_the_pipe(small_store):
    forking = WORKER.replace("time.sleep(600)", "import os\nif os.fork(): time.sleep(600)\nelse: time.sleep(30)")
    worker = subprocess.Popen([sys.executable, "-c", forking, str(small_store)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    time.sleep(0.3)  # the fork comes after the line
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    worker.kill()
    worker.wait()
    worker.stdout.close()
    try:
        assert wait_for_end(pid)
    finally:
        for child in children:
            if int(child) != pid:
                os.kill(int(child), signal.SIGKILL)
