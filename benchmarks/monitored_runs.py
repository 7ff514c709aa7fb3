"""Two runs of ``train_ray.py`` that differ in how they are watched, at once, and whether they are watched so.

In: launches (:mod:`benchmarks.launching`) and two ways of watching. Out: a :class:`Pair` that both runs are part of
until it is left, for :mod:`benchmarks.slices` to measure. Before that both start and take their first steps at the same
time, unstopped, and W&B's trouble has begun. Every slice of a run ends with a look at its folder: a run that is not
watched as was said is no comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from benchmarks.background_program import BackgroundProgram
from benchmarks.launching import Changes, Launches, ray_command, require_same_losses
from benchmarks.slices import SlicedProgram, Slices
from benchmarks.stage import Device, Facts, WrongWorkError
from run_folder.metrics_log import MetricsTail

if TYPE_CHECKING:
    from run_folder.paths import RunFolder
    from tests.monitoring.fake_wandb_server import FakeWandbServer

Server: TypeAlias = Literal["none", "unreachable", "slow", "broken"]

INTERVAL_S = 5.0
"""The default of training.gpu_log_interval."""
START_LIMIT_S = 600.0
_CLOSED = "http://127.0.0.1:9"
"""Port 9 is for discarding; nothing listens on it."""
_SAMPLES_LACKING = 4
"""Of the samples that are due by the clock, one in so many must be there: a stopped run takes none."""
_POLL_S = 0.2


@dataclass(frozen=True)
class Watching:
    """A way of watching a run.

    Attributes:
        changes: settings of the run's config.
        server: what is wrong with W&B's server; "none" where none is asked. "slow" and "broken" begin with the first
            values that W&B sends.
    """

    changes: Changes
    server: Server = "none"

    @property
    def is_sampled(self) -> bool:
        """Whether workers take samples."""
        return self.changes["training"]["gpu_log_interval"] > 0

    @property
    def has_wandb(self) -> bool:
        """Whether W&B records the run."""
        return self.changes["wandb"]["mode"] != "disabled"

    @property
    def is_offline(self) -> bool:
        """Whether W&B writes to a file: where it was told so, or the server was not there at the start."""
        return self.has_wandb and self.server not in ("slow", "broken")


@dataclass
class Evidence:
    """What a run's folder shows of how it is watched."""

    watching: Watching
    folder: RunFolder
    workers: int

    def __post_init__(self) -> None:
        files = [self.folder.monitoring / f"worker-{worker:05d}.jsonl" for worker in range(self.workers)]
        self._tails = [MetricsTail(file) for file in files]
        self._samples = [0] * self.workers
        self._since_s: float | None = None

    def begin(self) -> None:
        """From now on samples must come; each worker has its first."""
        self.require()
        self._samples = [0] * self.workers
        self._since_s = time.time()

    def require(self) -> None:
        """Raise WrongWorkError unless the run is watched as it should be."""
        self._require_samples()
        _require(self.watching.has_wandb or not self._wandb(), "W&B recorded a run that was not to be watched")
        _require(bool(self._wandb()) or not self.watching.has_wandb, "W&B recorded nothing")
        is_offline = self.is_offline()
        wrong = "offline" if is_offline else "online"
        _require(is_offline == self.watching.is_offline, f"W&B recorded it {wrong}")

    def is_offline(self) -> bool:
        """Whether W&B writes to a file; the folder of a vain try to go online may lie beside it."""
        return any(name.startswith("offline-run-") for name in self._wandb())

    def _wandb(self) -> list[str]:
        return [path.name for path in (self.folder.path / "wandb").glob("*run-*") if path.is_dir()]

    def _require_samples(self) -> None:
        if not self.watching.is_sampled:
            _require(not any(self.folder.monitoring.glob("worker-*.jsonl")), "it was watched")
            return
        for worker, tail in enumerate(self._tails):
            self._samples[worker] += sum(1 for _ in tail.poll())
        due = 0.0 if self._since_s is None else (time.time() - self._since_s) / INTERVAL_S
        least = 1 if self._since_s is None else int(due / _SAMPLES_LACKING)
        _require(
            min(self._samples) >= least,
            f"not every worker was sampled: {self._samples} samples where at least {least} were due",
        )


@dataclass
class MonitoredRun:
    """A run that goes on until it is ended."""

    program: BackgroundProgram
    evidence: Evidence
    sliced: SlicedProgram = field(init=False)

    def __post_init__(self) -> None:
        metrics, workers = self.evidence.folder.metrics, self.evidence.workers
        self.sliced = SlicedProgram(self.program.family, metrics, self.check, computing=workers)

    def check(self) -> None:
        """Raise where it has ended or is not watched as it should be."""
        self.program.require_alive()
        self.evidence.require()


@dataclass
class Pair:
    """Both runs, by name, and the server of the first one's W&B.

    Attributes:
        facts: CPU time that each took, filled as slices are measured.
    """

    runs: Mapping[str, MonitoredRun]
    server: FakeWandbServer | None
    slice_s: float
    warmup_steps: int
    device: Device
    facts: Facts = field(default_factory=dict)
    _slices: Slices | None = None

    def wait_until_steady(self) -> Facts:
        """Return when both have taken their first steps, the same ones, and W&B's trouble has begun."""
        deadline = time.monotonic() + START_LIMIT_S
        sliced = [run.sliced for run in self.runs.values()]
        while True:
            for run in self.runs.values():
                run.program.require_alive()
                run.sliced.new_steps()
            if all(len(program.losses) >= self.warmup_steps for program in sliced) and self._server_is_ready():
                break
            if time.monotonic() > deadline:
                steps = {name: len(run.sliced.losses) for name, run in self.runs.items()}
                raise RuntimeError(f"not ready within {START_LIMIT_S:.0f} s: steps {steps}")
            time.sleep(_POLL_S)
        for run in self.runs.values():
            run.evidence.begin()
        some, others = (program.losses[: self.warmup_steps] for program in sliced)
        require_same_losses(some, others, self.device)
        return {"first steps, checked to have the same losses": self.warmup_steps}

    def slice_of(self, name: str) -> Callable[[], float]:
        """What measures the next slice of this run."""
        return lambda: self._speed(name)

    def _speed(self, name: str) -> float:
        if self._slices is None:
            self._slices = Slices({name: run.sliced for name, run in self.runs.items()}, self.slice_s)
        speed = self._slices.speed(name)
        program = self.runs[name].sliced
        self.facts[f"CPU seconds of a million tokens, {name}"] = 1e6 * program.cpu_s / program.tokens
        self.facts[f"of these beside the computation, {name}"] = 1e6 * program.beside_s / program.tokens
        return speed

    def _server_is_ready(self) -> bool:
        if self.server is not None:
            return self.server.behaviour == self.server.behaviour_at_history
        return all(run.evidence.is_offline() == run.evidence.watching.is_offline for run in self.runs.values())


@contextmanager
def side_by_side(launches: Launches, ways: Mapping[str, Watching], slice_s: float) -> Iterator[Pair]:
    """Start two runs, of which the first may have a W&B server; end both and all their processes."""
    from tests.monitoring.fake_wandb_server import fake_wandb_server

    with ExitStack() as stack:
        trouble = next(iter(ways.values())).server
        server = None
        if trouble in ("slow", "broken"):
            server = stack.enter_context(fake_wandb_server())
            server.behaviour_at_history = trouble
        runs: dict[str, MonitoredRun] = {}
        for name, watching in ways.items():
            said = launches.setting.folder / f"{len(runs)}.log"
            runs[name] = _start(launches, watching, _CLOSED if server is None else server.url, said)
            stack.callback(runs[name].program.end)
        try:
            yield Pair(runs, server, slice_s, launches.warmup_steps, launches.setting.device)
        finally:
            for run in runs.values():
                run.program.ask_to_end()  # all before any is waited for


def _start(launches: Launches, watching: Watching, address: str, said: Path) -> MonitoredRun:
    config, folder = launches.prepare(watching.changes)
    wandb = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0123456789" * 4}
    program = BackgroundProgram(ray_command(config), said, wandb)
    return MonitoredRun(program, Evidence(watching, folder, launches.workers))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise WrongWorkError(f"a run is no comparison: {otherwise}")
