"""A loader process answers in order, ends with its worker, survives Ctrl-C, and reports what went wrong."""

import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.batches.loader_process import LoaderProcess
from esmeray.dataset.batches.preparation import PreparationSettings, prepare_batch
from esmeray.dataset.store.reader import Store
from esmeray.tasks.masked_lm.section import MaskedLMSection

SETTINGS = PreparationSettings(200, 1, True, MaskedLMSection())
DEADLINE_S = 20.0

FORK = multiprocessing.get_context("fork")


def started(store: Path) -> LoaderProcess:
    return LoaderProcess(partial(prepare_batch, Store(store), SETTINGS))


@pytest.fixture(scope="module")
def process(small_store):
    process = started(small_store)
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


def test_an_error_in_a_loader_process_arrives_with_its_traceback(process):
    process.request(0, np.array([10_000]))
    process.request(0, np.array([1]))
    with pytest.raises(RuntimeError, match=r"in a loader process:\nTraceback[\s\S]*IndexError"):
        process.reply()
    assert process.reply().cu_seqlens.size == 2


def test_ctrl_c_does_not_end_the_process(process):
    assert os.getpgid(process.pid) != os.getpgrp()  # so a terminal's Ctrl-C misses it, from its start on
    for _ in range(5):
        process.request(0, np.array([0]))
        process.reply()
        os.kill(process.pid, signal.SIGINT)


def test_process_without_references_ends(small_store):
    process = started(small_store)
    pid = process.pid
    del process
    assert not is_running(pid)


def work_and_fork(store: Path, connection: Connection) -> None:
    process = started(store)
    process.request(0, np.arange(5))
    process.reply()
    for _ in range(200):
        process.request(0, np.arange(100))
    child = os.fork()
    if child:
        connection.send((process.pid, child))
    time.sleep(600)


def test_a_killed_worker_leaves_no_loader_process(small_store):
    ours, its = FORK.Pipe()
    worker = FORK.Process(target=work_and_fork, args=(small_store, its))
    worker.start()
    pid, child = ours.recv()
    worker.kill()
    worker.join()
    try:
        assert wait_for_end(pid)
    finally:
        os.kill(child, signal.SIGKILL)
