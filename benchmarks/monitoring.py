"""What monitoring costs: training watched in every way, beside the same run with nothing watched, in turns.

Watched as by default: each worker samples itself, the machine and its GPUs every five seconds, the figures go to
Prometheus through Ray, to W&B in a file, and to the alerts. Then the same with W&B online and in trouble, which no run
may notice: a server that is not there, one that takes ten seconds for each call, and one whose calls fail; the last
two from the first values on, when W&B has begun to upload. All train a masked LM by ``train_ray.py`` as in
:mod:`benchmarks.launching`, on all cores or GPUs, and only steady steps count. What the sampler alone takes is measured
in a process that has threads and children as a worker has: process CPU time with it, less that without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launching import SIZES, TOKENS, Changes, Launches, make_store, worker_count
from benchmarks.proteins import Proteins, read_proteins
from benchmarks.stage import Case, Comparison, Contender, Device, Facts, Reference, Setting, Stage, WrongWorkError

WATCHED, UNWATCHED = "watched", "not watched"
UNGUARDED = "not watched, no memory guard"
UNREACHABLE, SLOW, BROKEN = "W&B unreachable", "W&B slow", "W&B failing"
TRAINING, SAMPLER = "training", "CPU time of a worker's sampler"
ONE_PERCENT = Reference("1 % of a core", 1.0)

STEPS = {"cpu": (5, 30), "cuda": (10, 120)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_STEPS = (1, 3)
ROUNDS, SAMPLER_ROUNDS = 5, 3
INTERVAL_S = 5.0
"""The default of training.gpu_log_interval."""
SAMPLED_S, QUICK_SAMPLED_S = 30.0, 2.0
FLOOR = 0.99
_CLOSED = "http://127.0.0.1:9"
"""Port 9 is for discarding; nothing listens on it."""
_REPOSITORY = Path(__file__).resolve().parent.parent

ON: Changes = {"training": {"gpu_log_interval": INTERVAL_S}, "wandb": {"mode": "offline"}}
ONLINE: Changes = {**ON, "wandb": {"mode": "online"}}
OFF: Changes = {
    "training": {"gpu_log_interval": 0.0},
    "monitoring": {"prometheus": False, "alerts": {"enabled": False}},
    "wandb": {"mode": "disabled"},
}
NO_GUARD: Changes = {**OFF, "training": {**OFF["training"], "memory_guard": {"enabled": False}}}


@dataclass
class MonitoredRuns:
    """Runs under each way of watching, and whether they were watched so."""

    launches: Launches

    def unwatched(self, changes: Changes = OFF) -> float:
        """Real tokens per second with nothing watched."""
        rate = self.launches.with_ray(changes)
        self._require(self._samples() == [], "it was watched")
        return rate

    def watched(self) -> float:
        """Real tokens per second with everything on."""
        return self._with_monitoring(ON, {})

    def unreachable(self) -> float:
        """With a W&B server that is not there."""
        return self._with_monitoring(ONLINE, _wandb_variables(_CLOSED))

    def slow(self) -> float:
        """With a W&B server that takes ten seconds for each call."""
        return self._with_server("slow")

    def broken(self) -> float:
        """With a W&B server whose calls fail."""
        return self._with_server("broken")

    def _with_server(self, behaviour: str) -> float:
        from benchmarks.fake_wandb_server import fake_wandb_server

        with fake_wandb_server() as server:
            server.behaviour_at_history = behaviour
            return self._with_monitoring(ONLINE, _wandb_variables(server.url))

    def _with_monitoring(self, changes: Changes, environment: Mapping[str, str]) -> float:
        rate = self.launches.with_ray(changes, environment)
        self._require(len(self._samples()) == self.launches.workers, "not every worker was sampled")
        folder = self.launches.last_run
        self._require(folder is not None and any(folder.path.glob("wandb/*run-*")), "W&B recorded nothing")
        return rate

    def _samples(self) -> list[Path]:
        assert self.launches.last_run is not None
        return sorted(self.launches.last_run.monitoring.glob("worker-*.jsonl"))

    @staticmethod
    def _require(condition: bool, otherwise: str) -> None:
        if not condition:
            raise WrongWorkError(f"a run is no comparison: {otherwise}")


def sampler_percent(seconds: float) -> float:
    """CPU time of a worker's sampler at the default interval, percent of a core.

    Args:
        seconds: over which it is measured, with the sampler and then without.
    """
    command = [sys.executable, "-m", "benchmarks.sampler_process", str(INTERVAL_S), str(seconds)]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the sampler's process ended with code {done.returncode}: {done.stderr[-2000:]}")
    measured = json.loads(done.stdout)
    return 100 * (measured["with_s"] - measured["without_s"]) / seconds


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    setting.note("writing the store")
    warmup_steps, steps = QUICK_STEPS if setting.quick else STEPS[setting.device]
    launches = Launches(setting, make_store(setting, proteins), worker_count(setting), warmup_steps, steps)
    runs = MonitoredRuns(launches)
    measured = {
        UNWATCHED: runs.unwatched,
        UNGUARDED: lambda: runs.unwatched(NO_GUARD),
        WATCHED: runs.watched,
        UNREACHABLE: runs.unreachable,
        SLOW: runs.slow,
        BROKEN: runs.broken,
    }
    contenders = tuple(Contender(name, run, kind="value") for name, run in measured.items())
    yield Case(TRAINING, "tokens/s", contenders, rounds=ROUNDS, facts=_facts(setting, proteins, launches))
    sampled_s = QUICK_SAMPLED_S if setting.quick else SAMPLED_S
    yield Case(
        SAMPLER,
        "% of a core",
        (Contender(WATCHED, lambda: sampler_percent(sampled_s), kind="value"),),
        better="lower",
        rounds=SAMPLER_ROUNDS,
        facts={"interval in s": INTERVAL_S, "seconds measured": sampled_s},
    )


def _facts(setting: Setting, proteins: Proteins, launches: Launches) -> Facts:
    return {
        **proteins.facts,
        "model": "toy" if setting.quick else SIZES[setting.device],
        "workers": launches.workers,
        "token budget of each worker's step": TOKENS[setting.device],
        "first steps not measured": launches.warmup_steps,
        "steps measured": launches.steps,
        "seconds between samples": INTERVAL_S,
    }


def _wandb_variables(address: str) -> dict[str, str]:
    return {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0123456789" * 4}


_FLOORS: dict[Device, float] = {"cpu": FLOOR, "cuda": FLOOR}

STAGE = Stage(
    name="monitoring",
    summary="training that is watched in every way, beside training that is not; also with W&B in trouble",
    cases=_cases,
    comparisons=(
        *(
            Comparison(TRAINING, name, UNWATCHED, _FLOORS, label=f"training, {name}")
            for name in (WATCHED, UNREACHABLE, SLOW, BROKEN)
        ),
        Comparison(TRAINING, UNWATCHED, UNGUARDED, _FLOORS, label="training, memory guard"),
        Comparison(SAMPLER, WATCHED, ONE_PERCENT, {"cpu": 1.0, "cuda": 1.0}),
    ),
    packages=("ray", "deepspeed", "wandb"),
    distributions=("ray", "deepspeed", "transformers", "wandb"),
)
