"""What Ray Train costs: the same worker loop started by ``train_ray.py`` and by torchrun, in turns.

Both train a masked LM from the same config and store with as many workers: one a GPU, or two of one core each. The Ray
run is a user's own: a local cluster with its dashboard, reports, progress and metrics; the other is
:mod:`benchmarks.worker_program`, which knows no Ray. Only steady steps count, as the run's metrics.jsonl has them: not
the first ones, and neither start-up nor checkpoints.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from benchmarks.proteins import MAX_RESIDUES, Proteins, read_proteins, write_fasta
from benchmarks.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage, WrongWorkError

if TYPE_CHECKING:
    from run_folder.paths import RunFolder

Changes: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Settings of a run's config, by section."""

RAY = "Ray Train"
TORCHRUN = "torchrun"
CASE = "the same worker loop"

SIZES = {"cpu": "esm2_t6_8M", "cuda": "esm2_t30_150M"}
TOKENS = {"cpu": 2048, "cuda": 32768}
"""Token budget of the one packed batch that each worker takes in a step."""
STEPS = {"cpu": (5, 20), "cuda": (10, 60)}
"""Optimizer steps that are not measured, and those that are."""
QUICK_SIZE = {"layers": 1, "hidden_size": 32, "heads": 2}
QUICK_PROTEINS, QUICK_STEPS = 200, (1, 3)
WORKERS_WITHOUT_GPU = 2
ROUNDS = 5
RAY_NICENESS = int(os.environ.get("RAY_worker_niceness", "15"))  # noqa: SIM112 (so Ray spells it)
"""Ray lets other processes of the machine go before its workers; the workers of torchrun do the same here."""
END_TIMEOUT_S = 60.0
NEVER = 10**9
"""Steps that no run gets to."""
_REPOSITORY = Path(__file__).resolve().parent.parent
LAST_WORDS = 2000
"""Characters of what a program said that are shown where it failed."""


@dataclass
class Launches:
    """Starts the loop under either launcher.

    Attributes:
        setting: device and folder.
        store: the store that all runs read.
        workers: how many.
        warmup_steps, steps: not measured, and measured.
        losses: of each run's steps, to see that all did the same.
    """

    setting: Setting
    store: Path
    workers: int
    warmup_steps: int
    steps: int
    losses: list[list[float]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def with_ray(self) -> float:
        """Real tokens per second of a run by ``train_ray.py``."""
        return self._measured(ray_command)

    def with_torchrun(self) -> float:
        """Real tokens per second of a run by torchrun."""
        polite = ["nice", "-n", str(RAY_NICENESS)]
        launcher = [*polite, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        program = [str(self.workers), "-m", "benchmarks.worker_program"]
        return self._measured(lambda config: [*launcher, *program, str(config), str(self.store)])

    def prepare(self, changes: Changes | None = None) -> tuple[Path, RunFolder]:
        """Write the config of another run, with these changes, and return it and the folder of the run."""
        from run_folder.paths import RunFolder
        from train_config.loading import dump_config
        from train_config.schema import Config

        name = f"run-{next(self._numbers)}"
        settings = self._settings(name)
        for section, values in (changes or {}).items():
            settings[section] = {**settings.get(section, {}), **values}
        config = Config.model_validate(settings)
        path = self.setting.folder / f"{name}.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        return path, RunFolder(config.run.storage_path, config.run.name)

    def _measured(self, command: Callable[[Path], list[str]]) -> float:
        from run_folder.metrics_log import read_metrics

        config, run = self.prepare()
        run_program(command(config))
        records = [record for record in read_metrics(run.metrics) if record["kind"] == "train"]
        if len(records) != self.warmup_steps + self.steps:
            raise RuntimeError(
                f"{run.path.name} trained {len(records)} steps in place of {self.warmup_steps + self.steps}"
            )
        self._compare([record["loss"] for record in records])
        return tokens_per_s(records[self.warmup_steps :])

    def _settings(self, name: str) -> dict[str, Any]:
        device = self.setting.device
        tokens = TOKENS[device]
        return {
            "run": {"name": name, "storage_path": str(self.setting.folder.resolve())},
            "data": {"source": [str(self.store)], "max_length": MAX_RESIDUES, "validation_share": 0.0},
            "batch": {"tokens": tokens, "global_tokens": tokens * self.workers},
            "model": {
                "task": "masked_lm",
                "backbone": {"source": SIZES[device], **(QUICK_SIZE if self.setting.quick else {})},
            },
            "training": {"max_steps": self.warmup_steps + self.steps, "evaluate_every_steps": NEVER},
            "checkpoint": {"every_steps": NEVER},
            "ray": {
                "address": "local",
                "num_workers": self.workers,
                "cpus_per_worker": "auto" if device == "cuda" else 1,
            },
            "wandb": {"mode": "disabled"},
        }

    def _compare(self, losses: list[float]) -> None:
        self.losses.append(losses)
        require_same_losses(self.losses[0], losses, self.setting.device)


def require_same_losses(some: Sequence[float], others: Sequence[float], device: Device) -> None:
    """The same loop on the same data: every step has the same loss, but for the order of sums on a GPU.

    Raises:
        WrongWorkError: it has not.
    """
    tolerance = 1e-2 if device == "cuda" else 1e-6
    worst = max(abs(a - b) / abs(a) for a, b in zip(some, others, strict=True))
    if not worst <= tolerance:
        raise WrongWorkError(f"losses of two runs of the same config differ by {worst:.1e} relative")


def ray_command(config: Path) -> list[str]:
    """What a user types."""
    return [sys.executable, "train_ray.py", "--config", str(config)]


def tokens_per_s(records: Sequence[dict[str, Any]]) -> float:
    """Real tokens over all the time that the steps took."""
    return sum(record["tokens"] for record in records) / sum(record["step_s"] for record in records)


def start_program(
    command: list[str],
    output: int | IO[str],
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
) -> subprocess.Popen[str]:
    """Start a launcher, with these variables besides those of this process; what it says goes to ``output``."""
    return subprocess.Popen(
        command,
        cwd=_REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | dict(environment or {}),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        # Linux shares cores out by session (sched(7), autogroup), and Ray makes one of its own.
        start_new_session=True,
    )


def run_program(command: list[str]) -> None:
    """Run a launcher to its end.

    Raises:
        RuntimeError: it failed; its last words are in the message.
    """
    process = start_program(command, subprocess.PIPE)
    with _ended_with_us(process):
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}: {said[-LAST_WORDS:]}")


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Ask the launcher to end where this process is stopped: killed, it would leave its workers behind."""
    try:
        yield process
    except BaseException:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    setting.note("writing the store")
    warmup_steps, steps = QUICK_STEPS if setting.quick else STEPS[setting.device]
    launches = Launches(setting, make_store(setting, proteins), worker_count(setting), warmup_steps, steps)
    yield Case(
        CASE,
        "tokens/s",
        (
            Contender(RAY, launches.with_ray, kind="value"),
            Contender(TORCHRUN, launches.with_torchrun, kind="value"),
        ),
        rounds=ROUNDS,
        facts=_facts(setting, proteins, launches),
    )


def worker_count(setting: Setting) -> int:
    """One a GPU, or two on the CPU."""
    if setting.device == "cpu":
        return WORKERS_WITHOUT_GPU
    import torch

    return torch.cuda.device_count()


def make_store(setting: Setting, proteins: Proteins) -> Path:
    """A store of the proteins, of a few where it is a smoke run."""
    from dataset.store.conversion import convert
    from train_config.schema import IngestSection

    sequences = proteins.sequences[: QUICK_PROTEINS if setting.quick else None]
    fasta, store = setting.folder / "proteins.fasta", setting.folder / "store"
    write_fasta(fasta, sequences, len(sequences))
    convert([str(fasta)], store, IngestSection())
    return store.resolve()


def _facts(setting: Setting, proteins: Proteins, launches: Launches) -> Facts:
    return {
        **proteins.facts,
        "model": "toy" if setting.quick else SIZES[setting.device],
        "workers": launches.workers,
        "token budget of each worker's step": TOKENS[setting.device],
        "first steps not measured": launches.warmup_steps,
        "steps measured": launches.steps,
    }


STAGE = Stage(
    name="launching",
    summary="the worker loop started by Ray Train, beside the same started by torchrun",
    cases=_cases,
    comparisons=(Comparison(CASE, RAY, TORCHRUN, {"cpu": 0.97, "cuda": 0.97}),),
    packages=("ray", "deepspeed"),
    distributions=("ray", "deepspeed", "transformers"),
)
