"""W&B can neither stop nor slow a run: the real wandb with a fake server, closed ports and files on disk."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from esmeray.monitoring.section import WandbSection
from esmeray.monitoring.sinks import wandb_run
from esmeray.monitoring.sinks.wandb_follower import CURVES, wandb_values
from esmeray.monitoring.sinks.wandb_run import PROGRAM, WandbFollowers
from esmeray.run_folder.paths import Outcome, RunFolder, sample_file
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from tests.conftest import REPOSITORY
from tests.monitoring.fake_wandb_server import FakeWandbServer, fake_wandb_server
from tests.monitoring.samples import append, sample, train, wait_until
from tests.monitoring.wandb_file import read_history, read_records

pytestmark = pytest.mark.slow

PATIENCE_S = 150.0
"""Maximum seconds that a test waits for an expected event, also on a busy machine."""
MARK = "ESMERAY_TEST_MARK"
RUN_ID = "abcd1234"
RECORDS = [train(step, step) for step in range(1, 101)]
VALUES = [wandb_values(record) for record in RECORDS]
LABELS = {"tags": ["esm2", "small"], "notes": "with *markup*", "group": "sizes", "job_type": "pretraining"}


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Set W&B's environment, and a mark in it that identifies all processes of a test, also orphaned ones."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home" / name))
    yield mark
    for process in marked_processes(mark):
        process.kill()


def marked_processes(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended meanwhile, a zombie, or another user's
            continue
    return processes


class Run:
    """A run folder, and the driver's warnings about W&B."""

    def __init__(self, path: Path, mode: str = "offline", **settings: Any) -> None:
        patient = {"finish_timeout_s": PATIENCE_S, "init_timeout_s": PATIENCE_S}
        self.section = WandbSection(**{"mode": mode, **patient, **settings})
        self.folder = RunFolder(path.parent, path.name)
        path.mkdir(exist_ok=True)
        self.folder.config.write_text(dump_config(Config(wandb=self.section)))
        self.folder.wandb_run_id.write_text(RUN_ID)
        self.warnings: list[str] = []

    def finish(self, **metrics: float) -> None:
        """Write the files of a finished run: plot of the curves, export, validation and outcome."""
        Image.new("RGB", (4, 4)).save(self.folder.curves)
        self.folder.export.mkdir()
        (self.folder.export / "model.safetensors").write_bytes(b"weights")
        append(self.folder.metrics, train(100, 100) | {"kind": "validation", **metrics})
        self.folder.write_outcome(Outcome("finished", 100, "trained", 0))

    def start(self, workers: int = 1) -> WandbFollowers:
        return WandbFollowers(self.section, self.folder, workers, warn=self.warnings.append)

    def assert_harmless(self, mark: str) -> None:
        """Check for one warning with the command that uploads everything, and no leftover process."""
        (warning,) = self.warnings
        assert f"'python -m {PROGRAM} {self.folder.path} --mode online'" in warning
        assert marked_processes(mark) == []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandbServer]:
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server


def series(history: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in history if name in row]


def test_offline_is_the_default_with_a_run_per_worker(tmp_path, monkeypatch, mark):
    assert WandbSection().mode == "offline"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    Run(tmp_path / "none", "disabled").start().close()
    assert not [*tmp_path.glob("none/wandb*/")]
    run = Run(tmp_path / "run", runs="per_worker", log_model=True, **LABELS)
    for worker in (0, 1):
        append(sample_file(run.folder.monitoring, worker), sample(worker, 200 + worker, gpu__0__util=worker))
    append(run.folder.metrics, *RECORDS[:50])
    wandb = run.start(workers=2)
    append(run.folder.metrics, *RECORDS[50:])
    alert = {
        "kind": "alert",
        "step": 3,
        "name": "memory",
        "subject": "GPU 0 on a",
        "state": "raised",
        "message": "full",
    }
    append(run.folder.alerts, alert | {"time": time.time() - 3600}, alert | {"time": time.time() + 3600})
    run.finish(loss=2.5)
    wandb.close()
    assert run.warnings == [] and marked_processes(mark) == [] and not [*tmp_path.glob("tmp*")]
    files = {}
    for file in run.folder.path.glob("wandb/*run-*/*.wandb"):
        started = [record.run for record in read_records(file) if record.HasField("run")]
        files[started[0].run_id] = file
        config = {item.key: json.loads(item.value_json) for item in started[0].config.update}
        assert config["wandb"]["mode"] == "offline"
        last = started[-1]
        assert {"tags": [*last.tags], "notes": last.notes, "group": last.run_group, "job_type": last.job_type} == LABELS
    assert set(files) == {RUN_ID, f"{RUN_ID}-1"}
    first, second = read_history(files[RUN_ID]), read_history(files[f"{RUN_ID}-1"])
    assert [row for row in first if "train/loss" in row] == VALUES
    assert (series(first, "gpu/0/util"), series(second, "gpu/0/util")) == ([0], [1])
    assert series(first, "alert/memory") == [1, 1] and not series(second, "alert/memory")
    (picture,) = series(first, f"{CURVES}.path")
    assert (files[RUN_ID].parent / "files" / picture).read_bytes() == run.folder.curves.read_bytes()
    records = {name: [] for name in ("alert", "artifact", "metric", "exit")}
    for record in read_records(files[RUN_ID]):
        kind = record.WhichOneof("record_type")
        records.get(kind, []).append(getattr(record, kind))
    sent = [(alert.title, alert.text, alert.level, alert.wait_duration) for alert in records["alert"]]
    assert sent == [("memory: GPU 0 on a", "full", "WARN", 300_000)], "an alert from before the start is not sent again"
    (model,) = records["artifact"]
    assert (model.name, model.type, [*model.aliases]) == ("run", "model", ["latest"])
    assert json.loads(model.metadata) == {"step": 100, "validation/loss": 2.5}
    (weights,) = model.manifest.contents
    assert (weights.path, weights.local_path) == ("model.safetensors", str(run.folder.export / "model.safetensors"))
    axes = {metric.name: metric.step_metric for metric in records["metric"]}
    assert {axes[name] for name in ("train/loss", "validation/loss", CURVES)} == {"step"}
    assert {axes[name] for name in ("gpu/0/util", "alert/memory")} == {"elapsed_s"}
    assert [end.exit_code for end in records["exit"]] == [0]


def test_server_gets_all_values_and_a_resumed_run_adds_new_ones(tmp_path, mark, server):
    run = Run(tmp_path / "run", "online", tags=["esm2"], notes="first")
    for steps, samples in ((range(60), range(2)), (range(60, 100), range(2, 4))):
        wandb = run.start()
        append(run.folder.metrics, *(RECORDS[step] for step in steps))
        append(sample_file(run.folder.monitoring, 1), *(sample(1, 30 * n, gpu__0__util=n) for n in samples))
        wandb.close()
        assert run.warnings == []
        Image.new("RGB", (4, 4)).save(run.folder.curves)  # between the starts: only the second start logs it
        server.known_run["tags"] += ["by hand"]
        server.known_run["notes"] = "edited"
    assert series(server.values(), "train/loss") == [1.0] * 100
    assert series(server.values(), "gpu/a/0/util") == [0, 1, 2, 3]
    assert len(series(server.values(), CURVES)) == 1
    assert server.known_run == {"tags": ["esm2", "by hand", "by hand"], "notes": "edited"}
    assert marked_processes(mark) == []


def test_failure_at_the_start_is_reported_while_the_run_goes_on(tmp_path, mark):
    run = Run(tmp_path / "run", "online", init_timeout_s=1.0)
    wandb = run.start()
    assert wait_until(lambda: run.warnings, PATIENCE_S)
    wandb.close()
    run.assert_harmless(mark)


def test_a_silent_server_costs_a_warning_and_uploads_later(tmp_path, monkeypatch, mark, server):
    monkeypatch.setattr(wandb_run, "MARGIN_S", 1.0)  # the follower waits the whole margin, as W&B's process hangs
    run = Run(tmp_path / "run", "online", finish_timeout_s=1.0)
    append(run.folder.metrics, *RECORDS[:50])
    wandb = run.start()
    assert wait_until(lambda: "file_stream" in server.requests, PATIENCE_S), run.warnings
    for process in marked_processes(mark):
        if process.name() == "wandb-core":
            process.send_signal(signal.SIGSTOP)
    append(run.folder.metrics, *RECORDS[50:])
    wandb.close()
    run.assert_harmless(mark)
    upload = [sys.executable, "-m", PROGRAM, str(run.folder.path), "--mode", "online"]
    subprocess.run(upload, cwd=REPOSITORY, check=True, timeout=PATIENCE_S)
    assert server.values() == VALUES


def test_a_stalled_model_upload_ends_at_its_timeout(tmp_path, mark, server):
    server.artifacts_stall = True
    run = Run(tmp_path / "run", "online", log_model=True, finish_timeout_s=2.0)
    append(run.folder.metrics, *RECORDS)
    wandb = run.start()
    assert wait_until(lambda: "file_stream" in server.requests, PATIENCE_S), run.warnings
    run.finish(loss=2.5)
    wandb.close()
    run.assert_harmless(mark)
    assert "(wandb.finish_timeout_s is 2, and wandb.log_model uploads the model)" in run.warnings[0]
    assert "CreateArtifact" in server.requests


def drive(run: Run) -> None:
    run.start()
    time.sleep(600)


def test_killed_driver_leaves_no_process(tmp_path, monkeypatch, mark):
    run = Run(tmp_path / "run", "online", finish_timeout_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        driver = multiprocessing.get_context("fork").Process(target=drive, args=(run,))
        driver.start()
        assert wait_until(lambda: "wandb-core" in [p.name() for p in marked_processes(mark)], PATIENCE_S)
        driver.kill()
        driver.join()
        assert wait_until(lambda: not marked_processes(mark), PATIENCE_S), marked_processes(mark)
