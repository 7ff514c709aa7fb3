import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import yaml
from transformers import AutoModel

from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from tests.chaos.history import problems, read_history
from tests.chaos.observed import Observer, observe
from tests.clusters import TOKEN, started_cluster
from tests.conftest import REPOSITORY
from tests.monitoring.wandb_file import read_records
from tests.ports import listening
from tests.runs import events, merged, run_folder, tiny_config
from tests.training.runs import assert_same_to_rounding
from tests.training.runs import finish as train_from_data
from tests.training.waits_for_steps import MEMORY_PERCENT, allowed_steps

TIMEOUT_S = 600
"""Seconds to wait for a step, which may take long on a busy machine."""
FEW_STEPS = {
    "batch": {"global_tokens": 1024},
    "training": {"max_steps": 20, "evaluate_every_steps": 10},
    "checkpoint": {"every_steps": 5},
    "ray": {"cpus_per_worker": 1},
}
PROGRAM = ("-m", "tests.training.waits_for_steps")
KEYS = {"WANDB_API_KEY": "3f9a" * 10, "HF_TOKEN": "hf_" + "5bd1" * 9}
"""Secrets in the environment, in addition to Ray's token."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def start(config: Config, address: str, *overrides: str) -> subprocess.Popen:
    file = Path(config.run.storage_path) / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_config(config))
    command = [sys.executable, *PROGRAM, "--config", str(file), "--ray.address", address]
    return subprocess.Popen(
        [*command, *overrides],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    return process.communicate(timeout=TIMEOUT_S)[0]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{process.stdout.read()}")
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.01)


def steps_done(config: Config) -> int:
    path = run_folder(config).metrics
    return len(re.findall('"kind":"train"', path.read_text())) if path.exists() else 0


def allow(config: Config, steps: int, process: subprocess.Popen) -> None:
    """Let the run take ``steps`` steps, and wait until it has taken them."""
    allowed_steps(run_folder(config)).write_text(str(steps))
    wait_for(lambda: steps_done(config) >= steps, process)


class Interrupted(NamedTuple):
    """A run on a local cluster that a signal ended, with its processes and its outcome."""

    config: Config
    home: Path
    family: list[psutil.Process]
    sockets: set[tuple[str, int]]
    authentication: str
    seconds: float
    exit_code: int
    output: str
    saved_step: int


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Interrupted:
    """A run after its fourth step. Slurm signals all processes of a job, including Ray's."""
    ray = {"num_workers": (1, 2), "minimum_stay_s": 0}
    config = tiny_config(tmp_path_factory.mktemp("followed"), **merged(FEW_STEPS, {"ray": ray}))
    run, home = run_folder(config), tmp_path_factory.mktemp("home")
    (run.path.parent / "faults.json").write_text("[]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))  # compiled code
        patch.setenv("HOME", str(home))
        for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
            patch.delenv(name)
        process = start(config, "local", "--ray.num_workers", "1")
    wait_for(run.config.exists, process)
    allow(config, 4, process)
    driver = psutil.Process(process.pid)
    family, sockets = driver.children(recursive=True), listening(driver)
    (head,) = [member for member in family if "gcs_server" in member.name()]
    authentication = head.environ()["RAY_AUTH_MODE"]
    begun = time.monotonic()
    for member in [driver, *driver.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGTERM)
    output = finish(process)
    seconds = time.monotonic() - begun
    (saved,) = CheckpointStore(run.checkpoints).complete()
    return Interrupted(config, home, family, sockets, authentication, seconds, process.returncode, output, saved.step)


@pytest.fixture(scope="module")
def followed(interrupted) -> tuple[Config, str]:
    """The interrupted run, resumed on a cluster that gains and loses a node; and the driver's output."""
    config = interrupted.config
    options = ["--wandb.mode", "offline", "--training.gpu_log_interval", "1"]
    with started_cluster(1) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, key in {**KEYS, MEMORY_PERCENT: "1"}.items():  # any machine uses 1 % of its memory
            patch.setenv(name, key)
        process = start(config, cluster.address, *options)
        wait_for(lambda: bool(events(config, "resumed")), process)
        allow(config, 7, process)
        cluster.add(1)
        wait_for(lambda: bool(events(config, "resized")), process)
        allow(config, 12, process)
        cluster.lose(cluster.nodes[1])
        # The remaining worker waits in a collective for the lost one, and takes no further step.
        allow(config, 20, process)
        output = finish(process)
    assert process.returncode == 0, output
    return config, output


def test_signal_to_a_local_cluster_saves_and_ends_all_processes(interrupted):
    """Other users cannot use the cluster: its token is not written to disk."""
    assert interrupted.seconds < 30
    assert interrupted.exit_code == 128 + signal.SIGTERM, interrupted.output
    for line in "stopping and saving a checkpoint", "ray get-auth-token --generate":
        assert interrupted.output.count(line) == 1
    assert len(interrupted.sockets) > 5 and {address for address, _ in interrupted.sockets} == {"127.0.0.1"}
    assert interrupted.authentication == "token"
    assert not (interrupted.home / ".ray").exists()
    assert interrupted.saved_step == 4
    _, alive = psutil.wait_procs(interrupted.family, timeout=10)
    assert not alive


def test_resized_run_equals_an_undisturbed_run(followed, process_group, tmp_path):
    config, output = followed
    sizes = [(event["step"], event["from"], event["to"]) for event in events(config, "resized")]
    assert sizes == [(7, 1, 2), (10, 2, 1)], output
    reasons = [event["why"] for event in events(config, "resized")]
    assert reasons == ["the cluster now has room for 2 workers", "workers failed"]
    assert [event["step"] for event in events(config, "resumed")] == [4, 7, 10]
    undisturbed = tiny_config(tmp_path, **FEW_STEPS)
    (tmp_path / "faults.json").write_text("[]")
    with pytest.MonkeyPatch.context() as patch:
        observe(Observer(tmp_path, 0, 1), patch.setattr)
        train_from_data(undisturbed)
    (planned,) = read_history(tmp_path / "history.jsonl")
    assert not problems(read_history(run_folder(config).path.parent / "history.jsonl"), planned)
    assert_same_to_rounding(config, undisturbed)


def test_run_reports_where_the_result_is_and_leaves_it_there(followed):
    config, output = followed
    run = run_folder(config)
    assert str(run.export) in output
    assert AutoModel.from_pretrained(run.export).config.hidden_size == 16
    assert run.curves.read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load(run.config.read_text())["batch"]["tokens"] == 256
    assert (run.checkpoints / "latest").read_text() == "step-00000020\n"
    assert json.loads((run.path / "outcome.json").read_text())["status"] == "finished"
    run_id = run.wandb_run_id.read_text()
    files = list(run.path.glob("wandb/offline-run-*/*.wandb"))
    assert [run_id in file.name for file in files] == [True]
    newest = CheckpointStore(run.checkpoints).complete()[0]
    assert newest.manifest().wandb_run_id == run_id


def test_secrets_of_the_environment_are_never_written_or_printed(followed):
    config, output = followed
    folder = run_folder(config).path
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(files) > 20 and any(path.suffix == ".wandb" for path in files)
    for key in (TOKEN, *KEYS.values()):
        assert key not in output
        assert [path for path, content in files.items() if key.encode() in content] == []


def test_alert_is_told_once_at_the_terminal_in_its_file_and_in_wandb(followed):
    config, output = followed
    run = run_folder(config)
    (alert,) = read_metrics(run.alerts)
    assert (alert["name"], alert["state"]) == ("memory", "raised")
    assert output.count(f"warning: {alert['message']}") == 1
    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    sent = [record.alert.text for record in read_records(file) if record.WhichOneof("record_type") == "alert"]
    assert sent == [alert["message"]]
