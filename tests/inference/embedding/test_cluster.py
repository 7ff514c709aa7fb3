"""Actors of a Ray cluster compute the same bytes as one process, also if actors are lost."""

import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from esmeray.cluster.section import RaySection
from esmeray.common import processor
from esmeray.inference.embedding.job import run_job
from tests.inference.embedding.jobs import final_bytes, partial, replace, request
from tests.model.support import random_sequences

pytestmark = pytest.mark.slow


def actor_processes() -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline"])  # cmdline is None for zombies
    return [p for p in processes if any("_EmbeddingActor" in word for word in p.info["cmdline"] or ())]


@pytest.mark.nightly
def test_actors_give_the_bytes_of_one_process_and_a_lost_one_is_replaced(tmp_path: Path, ray_address: str):
    sequences = random_sequences([400 + number for number in range(80)])
    alone = request(tmp_path, sequences=sequences, outputs=["mean", "residues"], shard_tokens=500, tokens=128)
    run_job(replace(alone, output=tmp_path / "alone"))
    job = replace(alone, workers=2)
    killed: list[int] = []

    def kill_one() -> None:
        while not list(partial(job).glob("model/rows/*")):
            time.sleep(0.01)
        process = actor_processes()[0]
        killed.append(process.pid)
        process.send_signal(signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    (report,) = run_job(job, cluster=RaySection(address=ray_address))
    thread.join()
    assert killed and report["workers"] == 2
    assert final_bytes(job.output) == final_bytes(tmp_path / "alone")
    log = next((job.output / "logs").glob("*.log")).read_text()
    assert "a worker died and is being replaced" in log


def test_the_default_precision_is_that_of_the_nodes(tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch):
    nodes = "bf16" if processor.cpu_computes_bf16() else "fp32"
    (tmp_path / "cpuinfo").write_text("flags : avx2" if nodes == "bf16" else "flags : amx_bf16")
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    job = request(tmp_path, precision=None, workers=1)
    (report,) = run_job(job, cluster=RaySection(address=ray_address))
    assert report["precision"] == nodes
