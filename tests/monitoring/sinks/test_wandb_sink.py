"""W&B is never able to stop or slow a run. Real wandb, against a fake server, closed ports and files on disk."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.fake_wandb_server import FakeWandbServer, fake_wandb_server
from monitoring.sampling.metric_names import METRICS
from monitoring.sinks import wandb_sink
from monitoring.sinks.wandb_names import wandb_values
from monitoring.sinks.wandb_runs import open_wandb
from monitoring.sinks.wandb_sink import WandbSink
from tests.monitoring.samples import BEGAN_S, sample, train
from tests.monitoring.wandb_file import read_config, read_history, read_records, read_run_id
from train_config.schema import WandbSection

BUDGET_S = 15.0
"""What W&B may cost a run in all, whatever fails."""
PATIENCE_S = 60.0
"""How long a test waits for what must come, on a machine under any load."""
MARK = "ESMERAY_TEST_MARK"
RUN_ID = "abcd1234"
CONFIG = {"run": {"seed": 7}, "note": "a config"}
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """W&B's environment, and a mark by which all processes of a test are found, also those that lost their parents."""
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
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended meanwhile, a zombie, or another user's
            continue
    return found


def wait_until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def record(step: int, kind: str = "train") -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": 0.0, "loss": 1.0 / (1 + step)}


RECORDS = [record(step) for step in range(1000)]
VALUES = [wandb_values(record) for record in RECORDS]


class Observed:
    """A sink with what it cost and said."""

    def __init__(self, folder: Path, mode: str, init_timeout_s: float, finish_timeout_s: float) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        section = WandbSection(mode=mode, init_timeout_s=init_timeout_s, finish_timeout_s=finish_timeout_s)
        self.cost_s = 0.0
        with self._counted():
            self.sink = WandbSink(section, RUN_ID, "a run", folder, CONFIG, warn=self.warnings.append)

    def write(self, records: list[dict[str, Any]]) -> None:
        before_s = self.cost_s
        with self._counted():
            for record in records:
                self.sink.write(record)
        assert self.cost_s - before_s < 1.0

    def close(self) -> None:
        with self._counted():
            self.sink.close()
        print(f"cost {self.cost_s:.2f} s; {self.warnings}")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.cost_s += time.monotonic() - started

    def assert_harmless(self, mark: str, values: list[dict[str, Any]]) -> None:
        """Under 15 s in all, one warning, the values where it says, no process left behind."""
        assert self.cost_s < BUDGET_S
        (warning,) = self.warnings
        found = re.search(r"'wandb sync (?:--include-online )?(\S+)'", warning)
        assert found, warning
        assert read_history(wandb_file(Path(found[1]))) == values
        assert read_run_id(wandb_file(Path(found[1]))) == RUN_ID
        assert marked_processes(mark) == []


def healthy(folder: Path, mode: str = "online") -> Observed:
    return Observed(folder, mode, init_timeout_s=PATIENCE_S, finish_timeout_s=PATIENCE_S)


def wandb_file(folder: Path) -> Path:
    (path,) = folder.glob("*.wandb")
    return path


def synchronise(*arguments: object) -> None:
    """``wandb sync``; on a server, what it uploads replaces what was there."""
    command = [sys.executable, "-m", "wandb", "sync", *map(str, arguments)]
    subprocess.run(command, cwd=Path(str(arguments[-1])).parent, check=True, capture_output=True, timeout=PATIENCE_S)


def offline_folders(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "wandb").glob("offline-run-*"))


@contextmanager
def broken_address(failure: str) -> Iterator[str]:
    """An address where W&B fails from the start."""
    if failure == "unauthorised":
        with fake_wandb_server("unauthorised") as server:
            yield server.url
        return
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if failure == "black hole":
            bound.listen()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def running_online(
    monkeypatch: pytest.MonkeyPatch, folder: Path, finish_timeout_s: float = 2.0
) -> Iterator[tuple[Observed, FakeWandbServer]]:
    """A run that W&B has accepted: its stream to the server is open."""
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        observed = Observed(folder, "online", init_timeout_s=PATIENCE_S, finish_timeout_s=finish_timeout_s)
        assert wait_until(lambda: "file_stream" in server.requests), observed.warnings
        yield observed, server


# --- in good order


def test_offline_is_the_default_and_its_file_holds_config_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    records = [record(0, "validation"), *RECORDS, record(999, "validation")]
    assert WandbSection().mode == "offline"
    run = healthy(tmp_path, "offline")
    run.write(records)
    run.close()
    (folder,) = offline_folders(tmp_path)
    assert run.sink.offline_folder == folder
    file = wandb_file(folder)
    assert read_history(file) == [wandb_values(record) for record in records]
    assert {"train/loss", "validation/loss"} <= {name for row in read_history(file) for name in row}
    assert (read_run_id(file), read_config(file)) == (RUN_ID, CONFIG)
    assert run.warnings == []
    assert marked_processes(mark) == []
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        synchronise(folder)
        assert server.values() == read_history(file)


def test_resumed_run_goes_to_a_new_offline_folder_under_the_same_id(tmp_path: Path) -> None:
    for steps in (3, 5):
        run = healthy(tmp_path, "offline")
        run.write(RECORDS[:steps])
        run.close()
    first, second = (wandb_file(folder) for folder in offline_folders(tmp_path))
    assert read_run_id(first) == read_run_id(second) == RUN_ID
    assert (read_history(first), read_history(second)) == (VALUES[:3], VALUES[:5])


def test_server_in_good_order_gets_all_values_and_a_resumed_run_adds_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for steps in (600, 1000):
            run = healthy(tmp_path)
            run.write(RECORDS[:steps])
            run.close()
            assert run.warnings == []
            assert server.values() == VALUES[:steps]
    assert not offline_folders(tmp_path)
    assert marked_processes(mark) == []


def test_disabled_starts_and_writes_nothing(tmp_path: Path, mark: str) -> None:
    run = healthy(tmp_path, "disabled")
    run.write(RECORDS)
    assert not marked_processes(mark)
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_spool_without_room_leaves_out_samples_first_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_sink, "SPOOL_LIMIT_BYTES", 4096)
    run = healthy(tmp_path, "offline")
    run.write([sample(0, n, worker__0__step_s=1.0) for n in range(100)] + [train(1, 1)] + [alert("raised", 5.0)])
    run.close()
    history = read_history(wandb_file(offline_folders(tmp_path)[0]))
    written = series(history, "worker/0/step_s")
    assert 10 < len(written) < 30
    assert series(history, "train/loss") == [1.0] and series(history, "alert/memory") == [1]
    (warning,) = run.warnings
    assert f"lacks {100 - len(written)} records" in warning


# --- samples and alerts


def samples_of_two_nodes(count: int = 3) -> list[dict[str, Any]]:
    """Two machines with a GPU and a worker each: every figure of the catalogue, and the records of the loop."""
    records = []
    for number in range(count):
        records.append(train(number + 1, 5 * number))
        for worker, host in ((0, "a"), (1, "b")):
            figures = {m.of(worker if m.per == "worker" else 0): float(number + worker) for m in METRICS}
            if worker:
                figures = {name: value for name, value in figures.items() if not name.startswith(("perf/", "train/"))}
            records.append(sample(worker, 5 * number + 1 + worker / 2, host=host) | {"figures": figures})
    return records


def alert(state: str, time_s: float, name: str = "memory") -> dict[str, Any]:
    return {"kind": "alert", "step": 3, "time": time_s, "name": name, "state": state, "message": "GPU 0 is full"}


def series(history: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in history if name in row]


def test_one_run_holds_every_figure_of_both_workers_and_nodes(tmp_path: Path) -> None:
    run = healthy(tmp_path, "offline")
    run.write(samples_of_two_nodes())
    run.close()
    history = read_history(wandb_file(offline_folders(tmp_path)[0]))
    for metric in METRICS:
        if metric.per in ("gpu", "host"):
            assert series(history, metric.of(0)) == [0, 1, 2], metric.name
            assert series(history, f"node/b/{metric.of(0)}") == [1, 2, 3], metric.name
        elif metric.per == "worker":
            assert (series(history, metric.of(0)), series(history, metric.of(1))) == ([0, 1, 2], [1, 2, 3])
        elif metric.name != "train/loss":
            assert series(history, metric.name) == [0, 1, 2], metric.name
    assert [(row["step"], row["train/loss"]) for row in history if "train/loss" in row] == [(1, 1), (2, 1), (3, 1)]
    assert series(history, "elapsed_s") == [1, 1.5, 6, 6.5, 11, 11.5]


def test_figures_are_drawn_against_time_and_the_loops_against_the_step(tmp_path: Path) -> None:
    run = healthy(tmp_path, "offline")
    run.write(samples_of_two_nodes(1))
    run.close()
    records = read_records(wandb_file(offline_folders(tmp_path)[0]))
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.WhichOneof("record_type") == "metric"}
    shown = {name for row in read_history(wandb_file(offline_folders(tmp_path)[0])) for name in row if "/" in name}
    for name in shown - {"position/worker/0", "position/worker/1"}:
        assert axes[name.partition("/")[0] + "/*"] == ("step" if name.startswith("train/") else "elapsed_s")
    moments = [item for r in records for item in r.history.item if item.nested_key == ["_timestamp"]]
    assert float(moments[0].value_json) == BEGAN_S


def test_resumed_run_adds_the_samples_that_the_server_lacks_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        records = samples_of_two_nodes(4)
        for known in (records[:5], records):
            run = healthy(tmp_path)
            run.write(known)
            run.close()
            assert run.warnings == []
        for name in ("worker/0/forward_s", "gpu/0/util", "train/loss", "elapsed_s"):
            assert len(series(server.values(), name)) == (8 if name == "elapsed_s" else 4), name
        assert series(server.values(), "worker/1/forward_s") == [1, 2, 3, 4]


def test_alert_is_sent_once_and_its_state_is_in_the_history(tmp_path: Path) -> None:
    history_s, now_s = time.time() - 60, time.time() + 60
    records = [train(1, 0), alert("raised", history_s), alert("cleared", history_s + 1), alert("raised", now_s)]
    run = healthy(tmp_path, "offline")
    run.write(records)
    run.close()
    file = wandb_file(offline_folders(tmp_path)[0])
    sent = [r.alert for r in read_records(file) if r.WhichOneof("record_type") == "alert"]
    assert [(a.title, a.text, a.level) for a in sent] == [("memory nearly full", "GPU 0 is full", "WARN")]
    assert series(read_history(file), "alert/memory") == [1, 0, 1]


def test_run_per_worker_has_each_workers_figures_in_one_group(tmp_path: Path, mark: str) -> None:
    section = WandbSection(runs="per_worker", init_timeout_s=PATIENCE_S, finish_timeout_s=PATIENCE_S)
    warnings: list[str] = []
    sink = open_wandb(section, RUN_ID, "a-run", tmp_path, CONFIG, warn=warnings.append)
    for record in samples_of_two_nodes():
        sink.write(record)
    sink.close()
    assert warnings == [] and marked_processes(mark) == []
    files = {read_run_id(wandb_file(folder)): wandb_file(folder) for folder in offline_folders(tmp_path)}
    assert set(files) == {RUN_ID, f"{RUN_ID}-1"}
    groups = {r.run.run_group for file in files.values() for r in read_records(file) if r.HasField("run")}
    assert groups == {"a-run"}
    first, second = read_history(files[RUN_ID]), read_history(files[f"{RUN_ID}-1"])
    assert series(first, "gpu/0/util") == [0, 1, 2] and series(second, "gpu/0/util") == [1, 2, 3]
    assert series(first, "worker/0/forward_s") == [0, 1, 2] and series(second, "worker/1/forward_s") == [1, 2, 3]
    assert series(first, "train/loss") and not series(second, "train/loss")
    assert series(second, "elapsed_s") == [1.5, 6.5, 11.5]


# --- failures


@pytest.mark.parametrize("failure", ["refused", "black hole", "unauthorised"])
def test_failure_at_the_start_costs_only_a_warning(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with broken_address(failure) as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        run = Observed(tmp_path, "online", init_timeout_s=1.0, finish_timeout_s=PATIENCE_S)
        run.write(RECORDS)
        assert wait_until(lambda: run.warnings)
        run.close()
    run.assert_harmless(mark, VALUES)


def test_run_that_ends_before_a_silent_server_was_given_up_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with broken_address("black hole") as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        run = Observed(tmp_path, "online", init_timeout_s=PATIENCE_S, finish_timeout_s=4.0)
        run.write(RECORDS)
        run.close()
    run.assert_harmless(mark, VALUES)


@pytest.mark.parametrize("failure", ["silent", "close", "unauthorised"])
def test_failure_in_the_middle_costs_only_a_warning(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with running_online(monkeypatch, tmp_path) as (run, server):
        run.write(RECORDS[:500])
        server.behaviour = failure
        run.write(RECORDS[500:])
        run.close()
    run.assert_harmless(mark, VALUES)


@pytest.mark.parametrize("failure", ["silent", "close"])
def test_failure_at_the_end_costs_only_a_warning_that_says_how_to_upload(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with running_online(monkeypatch, tmp_path) as (run, server):
        server.behaviour_at_history = failure
        run.write(RECORDS)
        run.close()
        assert server.behaviour == failure
        run.assert_harmless(mark, VALUES)
        server.behaviour = server.behaviour_at_history = "answer"
        said = re.search(r"'wandb sync (.+?)'", run.warnings[0])
        assert said
        synchronise(*said[1].split())
        assert server.values() == VALUES


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
def test_wandbs_service_frozen_or_killed_costs_only_a_warning(
    blow: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with running_online(monkeypatch, tmp_path, finish_timeout_s=4.0) as (run, _):
        run.write(RECORDS[:500])
        for process in marked_processes(mark):
            if process.name() == "wandb-core":
                process.send_signal(blow)
        run.write(RECORDS[500:])
        run.close()
    run.assert_harmless(mark, VALUES)


def test_without_a_key_nobody_is_asked_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        run = Observed(tmp_path, "online", init_timeout_s=PATIENCE_S, finish_timeout_s=PATIENCE_S)
        run.write(RECORDS)
        assert wait_until(lambda: run.warnings)
        run.close()
    run.assert_harmless(mark, VALUES)
    said = (tmp_path / "wandb" / "process.log").read_text()
    assert "Enter your choice" not in said and "paste an API key" not in said


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_no_room_for_wandbs_files_costs_only_a_warning(mode: str, tmp_path: Path, mark: str) -> None:
    (tmp_path / "wandb").write_text("not a folder")
    run = healthy(tmp_path, mode)
    run.write(RECORDS)
    run.close()
    assert len(run.warnings) == 1 and "metrics.jsonl holds all values" in run.warnings[0]
    assert run.cost_s < BUDGET_S and not marked_processes(mark)


def test_no_temporary_folder_costs_only_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    run = healthy(tmp_path)
    run.write(RECORDS)
    run.close()
    assert len(run.warnings) == 1 and "metrics.jsonl holds all values" in run.warnings[0]
    assert list(tmp_path.iterdir()) == [] and not marked_processes(mark)


# --- the driver itself


DRIVER = """
import sys, time
from monitoring.sinks.wandb_sink import WandbSink
from train_config.schema import WandbSection
section = WandbSection(mode=sys.argv[1], init_timeout_s=60, finish_timeout_s=1)
sink = WandbSink(section, "abcd1234", "a run", sys.argv[2], {})
sink.write({"kind": "train", "step": 0, "time": 0.0, "loss": 1.0})
time.sleep(600)
"""


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_killed_driver_leaves_no_process(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    with broken_address("black hole") as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, mode, str(tmp_path)], cwd=REPOSITORY)
        assert wait_until(lambda: any(process.name() == "wandb-core" for process in marked_processes(mark)))
        driver.kill()
        driver.wait()
        assert wait_until(lambda: not marked_processes(mark), BUDGET_S), marked_processes(mark)
