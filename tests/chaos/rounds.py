"""A round: a command that is hit by faults one after the other, and is started again until it succeeds."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyarrow.parquet import read_table
from yaml import safe_dump as dump_yaml

from benchmarks.programs.service import free_port
from esmeray.train_config.loading import dump_config
from esmeray.tuning.records import SearchFolder, Trial
from esmeray.tuning.search import read_trials
from tests.chaos.faults import FAULTS
from tests.chaos.history import TOLERANCE, committed, problems, read_history, seconds_to_a_step
from tests.clusters import Machines, Restore
from tests.conftest import REPOSITORY
from tests.inference.embedding.jobs import final_bytes, small_model_folder, write_proteins
from tests.model.support import random_sequences
from tests.runs import exported_weights, merged, run_folder, tiny_config, train_losses

LEFT_S = 20.0  # processes may take this long to end after the command
USUAL: dict[str, Any] = {
    "data": {"num_workers": 1},
    "training": {"optimizer": "muon", "watchdog_s": 6.0},
    "checkpoint": {"keep_last": 3},
    "ray": {"num_workers": 2, "cpus_per_worker": 1, "max_failures": 10},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "elastic": {"ray": {"num_workers": [1, 2], "minimum_stay_s": 1}},
    "W&B away": {"wandb": {"mode": "online", "init_timeout_s": 1, "finish_timeout_s": 1}},
}


@dataclass
class Met:
    """A planned fault, the time when it was inflicted, and the seconds until the next step."""

    kind: str
    phase: str
    step: int
    rank: int = 0
    time: float = 0.0
    back_s: float | None = None


class Round:
    """A command with its faults; ``spacing``: approximate steps, shards or seconds between two faults.

    Subclasses define the ``command``, whether it is started ``again``, and the ``result``, which must equal the result
    of the ``undisturbed`` round. A fault hits the process named ``actor`` when ``progress`` reaches the fault's step.
    """

    again = True
    actor = ""

    def __init__(self, machines: Machines, faults: list[Met], spacing: int, undisturbed: Any = None) -> None:
        self.machines, self.faults, self.spacing, self.undisturbed = machines, faults, spacing, undisturbed
        # Files that observe the round stay off the disk that is filled and made read-only.
        self.folder, self.data = (Path(tempfile.mkdtemp(prefix="chaos-", dir=at)) for at in (None, machines.disk))
        self.seconds = 0.0
        self.starts = 0
        self.checkpoints = Path()
        self.wrong, self.unmet = list[str](), list[Met]()
        self._mends: list[tuple[float, Restore]] = []
        (self.folder / "temporary").mkdir()
        self.prepare()

    def prepare(self) -> None:
        """Write the input files of the command."""

    def met(self, number: int) -> tuple[int, float] | None:
        """The pid of the process to hit with this fault now, and the time; None if it is too early."""
        return self.machines.find(self.actor) if self.progress() >= self.faults[number].step else None

    def same(self) -> bool:
        return self.result() == self.undisturbed.result()

    def check(self) -> list[str]:
        """Compare the outcome with the undisturbed round's."""
        return [] if self.same() else ["the result differs from the undisturbed round's"]

    def left(self) -> list[Any]:
        """Processes and files that the round has left so far."""
        return [*(self.folder / "temporary").iterdir()]

    def run(self) -> "Round":
        """Start the command and inflict faults on it until it succeeds."""
        began, struck, code = time.monotonic(), 0, -1
        while code != 0 and time.monotonic() < began + 600 + 6 * self.spacing:
            if code is not None:
                if self.starts and not self.again:
                    break
                self._mend(float("inf"))
                self.process, self.starts = self._start(), self.starts + 1
            if struck < len(self.faults) and not self._mends and (met := self.met(struck)):
                fault, (pid, fault.time) = self.faults[struck], met
                mend = FAULTS[fault.kind].inflict(self.machines, self.process, pid, self.checkpoints)
                self._mends += [(time.monotonic() + FAULTS[fault.kind].lasts_s, mend)] if mend else []
                (self.folder / f"go-{struck}").touch()
                struck += 1
            self._mend(time.monotonic())
            time.sleep(0.02)
            code = self.process.poll()
        ended = time.monotonic()
        self.seconds = ended - began
        self._mend(float("inf"))
        self.unmet, self.faults = self.faults[struck:], self.faults[:struck]  # unmet: the command ended first
        self.wrong = [] if struck or not self.unmet else ["no fault was met"]
        if code != 0:
            self.process.kill()
            self.wrong.append(f"the command did not end well, see {self.folder / 'output.txt'}")
        elif self.undisturbed is not None:
            self.wrong += self.check()
        while (left := self.left()) and time.monotonic() < ended + LEFT_S:
            time.sleep(0.2)
        self.wrong += [f"left: {leftover}" for leftover in left]
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, *self.command(self.machines.restore().address)]
        with (self.folder / "output.txt").open("ab") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            return subprocess.Popen(command, cwd=REPOSITORY, env=self.environment(), **streams)

    def environment(self) -> dict[str, str]:
        away = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "0"}
        return self.machines.restore().environment | away | {"TMPDIR": str(self.folder / "temporary")}

    def _mend(self, now: float) -> None:
        due = [mend for when, mend in self._mends if when <= now]
        self._mends = [(when, mend) for when, mend in self._mends if when > now]
        for mend in due:
            mend()

    def close(self) -> None:
        for folder in (self.folder, self.data):
            shutil.rmtree(folder)

    def __str__(self) -> str:
        faults = ", ".join(f"{fault.kind} in {fault.phase} at {fault.step}" for fault in self.faults)
        faults += f" ({len(self.unmet)} not met)" * bool(self.unmet)
        return f"{type(self).__name__}: {faults}: {self.seconds:.0f} s, {self.starts} starts, {self.wrong or 'equal'}"


class Training(Round):
    def prepare(self) -> None:
        sizes = {"max_steps": 6 * self.spacing, "evaluate_every_steps": 2 * self.spacing}
        steps = {"training": sizes, "checkpoint": {"every_steps": self.spacing + 1}}
        settings = SETTINGS.get(FAULTS[self.faults[-1].kind].settings, {}) if self.faults else {}
        self.config = tiny_config(self.data, **merged(merged(USUAL, steps), settings))
        self.checkpoints = run_folder(self.config).checkpoints
        acts = [FAULTS[fault.kind].how if FAULTS[fault.kind].what == "act" else "wait" for fault in self.faults]
        plan = [{**asdict(fault), "act": act} for fault, act in zip(self.faults, acts, strict=True)]
        (self.folder / "faults.json").write_text(json.dumps(plan))
        (self.folder / "config.yaml").write_text(dump_config(self.config))

    def command(self, address: str) -> list[str]:
        config = ["--config", str(self.folder / "config.yaml"), "--ray.address", address]
        return ["-m", "tests.chaos.observed", str(self.folder), *config]

    def met(self, number: int) -> tuple[int, float] | None:
        path = self.folder / f"met-{number}"
        return tuple(json.loads(path.read_text())) if path.exists() else None

    def outcome(self) -> Any:
        return read_history(self.folder / "history.jsonl"), train_losses(self.config), exported_weights(self.config)

    def check(self) -> list[str]:
        (planned,), losses, weights = self.undisturbed.outcome()
        attempts, own_losses, exported = self.outcome()
        ends = [*(fault.time for fault in self.faults[1:]), float("inf")]
        for fault, until in zip(self.faults, ends, strict=False):  # without a fault, `ends` has one value too many
            fault.back_s = seconds_to_a_step(attempts, fault.time, until)
        is_complete = own_losses.keys() == losses.keys()
        differences = problems(attempts, planned) + ([] if is_complete else ["metrics.jsonl is not a line a step"])
        same_workers = all(attempt.world == planned.world for attempt in committed(attempts).values())
        distance = max(float((exported[name] - weights[name]).abs().max()) for name in weights)
        if not distance <= (0 if same_workers else TOLERANCE):
            differences.append(f"exported weights are up to {distance:.1e} from the undisturbed run's")
        return differences

    def left(self) -> list[Any]:
        pids = {pid for attempt in read_history(self.folder / "history.jsonl") for pid in attempt.pids}
        return [*filter(psutil.pid_exists, pids), *self.data.rglob("*.partial"), *super().left()]


class Embedding(Round):
    actor = "_EmbeddingActor"

    def prepare(self) -> None:
        small_model_folder(self.folder / "model")
        write_proteins(self.folder / "proteins.fasta", random_sequences([400] * 720))

    def command(self, address: str) -> list[str]:
        files = {"models": self.folder / "model", "input": self.folder / "proteins.fasta"}
        sizes = {"output": self.data / "out", "shard_tokens": 1200, "tokens": 256, "precision": "fp32", "workers": 2}
        words = [word for name, value in (files | sizes).items() for word in (f"--embed.{name}", str(value))]
        return ["-m", "esmeray.tools", "embed", "run", *words, "--ray.address", address]

    def progress(self) -> int:
        return len([*self.data.glob("out.partial/model/rows/*")])

    def result(self) -> dict[str, bytes]:
        return final_bytes(self.data / "out")


class Search(Round):
    """A search: a killed worker is the result of the trial, as a configuration may be the cause."""

    actor = "_MeasuringActor"

    def prepare(self) -> None:
        one_each = {"ray": {"num_workers": 1, "cpus_per_worker": 1}}
        (self.folder / "config.yaml").write_text(dump_config(tiny_config(self.data, **one_each)))
        space = {"tokens": [64, 128, 256, 512], "num_workers": [0, 1], "precision": ["fp32", "bf16"]}
        how = {"measurement": {"window_s": 1.0}, "search": {"max_trials": 16}}
        (self.folder / "tune.yaml").write_text(dump_yaml({"name": "fast", "space": space, **how}))

    def command(self, address: str) -> list[str]:
        files = ["--config", str(self.folder / "config.yaml"), "--tune", str(self.folder / "tune.yaml")]
        return ["train_ray.py", *files, "--ray.address", address]

    def trials(self) -> list[Trial]:
        return read_trials(SearchFolder(self.data, "fast").trials)

    def progress(self) -> int:
        return len(self.trials())

    def result(self) -> tuple[int, set[Any], bool]:
        trials = self.trials()
        measured = all(trial.measurement.status == "ok" for trial in trials)
        return len(trials), {trial.settings for trial in trials}, measured


class Service(Round):
    """A service with a replica on each node. The command is the client, which repeats refused requests."""

    again = False
    actor = "ServeReplica:esmeray:esm"

    def command(self, address: str) -> list[str]:
        port = free_port()
        model = {"name": "esm", "source": str(small_model_folder(self.folder / "model")), "replicas": 2}
        serve = {"models": [model | {"precision": "fp32"}], "port": port, "ingress_replicas": 2}
        (self.folder / "serve.yaml").write_text(dump_yaml({"serve": serve, "ray": {"address": address}}))
        command = [sys.executable, "serve_ray.py", "--config", str(self.folder / "serve.yaml")]
        self.service = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, env=self.environment())
        assert b"ready" in self.service.stdout.readline()  # type: ignore[union-attr]
        write_proteins(self.folder / "proteins.fasta", random_sequences([400] * 12000))
        self.began = time.monotonic()
        files = ["--query.input", str(self.folder / "proteins.fasta"), "--query.output", str(self.data / "out.parquet")]
        return ["-m", "esmeray.tools", "serve", "query", *files, "--query.address", f"http://127.0.0.1:{port}"]

    def progress(self) -> float:
        return time.monotonic() - self.began

    def result(self) -> tuple[list[str], np.ndarray]:
        table = read_table(self.data / "out.parquet")
        return table["id"].to_pylist(), np.stack(table["embedding"].to_numpy())

    def same(self) -> bool:
        ids, values = self.result()
        planned_ids, planned = self.undisturbed.result()
        return ids == planned_ids and np.allclose(values, planned, rtol=1e-4, atol=1e-5) and self.starts == 1

    def left(self) -> list[Any]:
        self.service.terminate()
        return [*super().left(), *([] if self.service.wait(60) == 143 else ["the service did not end well"])]
