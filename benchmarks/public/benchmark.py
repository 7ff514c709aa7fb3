"""A public benchmark: its data, the commands that measure it, and what others published.

In: the development's data folder. Out: a file of values for each seed, beside the page, written when it is measured. A
seed whose file is there is not measured again, so that the page can be resumed, also on another machine.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from benchmarks.harness.machine import Machine, describe_machine, revision, versions
from benchmarks.harness.stage import REPOSITORY
from esmeray.common.errors import DataError
from esmeray.common.publishing import write_atomically

SEEDS = (0, 1, 2)


class Value(BaseModel):
    """A metric, with its 95 % interval over the records where there is one."""

    value: float
    interval: tuple[float, float] | None = None


class Measured(BaseModel):
    """One seed of a benchmark: its values, baselines' among them, and where they are from."""

    values: dict[str, Value]
    commands: list[str]
    seconds: float
    date: str
    revision: str
    versions: dict[str, str]
    machine: Machine


@dataclass(frozen=True)
class Work:
    """Inputs of a benchmark's seed.

    Attributes:
        data: folder of the public data.
        folder: kept until the seed is measured, so that a run in it is resumed.
        weights: folder or hub name of a trained language model; None for random weights.
        commands: those that were run, as the page shows them.
    """

    data: Path
    folder: Path
    seed: int
    weights: str | None
    commands: list[str] = field(default_factory=list)

    def run(self, *words: object) -> None:
        """``esmeray WORDS``; its output goes to ``log.txt``. Raises DataError where it fails."""
        log = self.folder / "log.txt"
        arguments = [str(word) for word in words]
        shown = shlex.join(["esmeray", *arguments])
        self.commands.append(shown.replace(str(self.folder), "FOLDER").replace(str(self.data), "DATA"))
        with log.open("ab") as output:
            command = [sys.executable, "-m", "esmeray.tools", *arguments]
            code = subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=output, check=False).returncode
        if code:
            raise DataError(f"{shown}: ended with code {code}; its output is in {log}")

    def read(self, name: str) -> dict:
        """A JSON file of the folder."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @property
    def backbone(self) -> list[str]:
        """Settings of a training that put the trained weights in place of the recipe's random ones."""
        if self.weights is None:
            return []
        sizes = [word for name in ("layers", "hidden_size", "heads") for word in (f"--model.backbone.{name}", "none")]
        # Frozen: on a CPU a head is trained in minutes on features that are computed once.
        return ["--model.backbone.source", self.weights, *sizes, "--model.backbone.frozen", "true"]


@dataclass(frozen=True)
class Metric:
    """A row of the page.

    Attributes:
        key: of the values of a seed.
        baseline: key of a plain baseline's value.
        published: values by the name of the method.
    """

    key: str
    title: str
    baseline: str | None = None
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublicBenchmark:
    """A public benchmark.

    Attributes:
        data: what it is, where it is from, its licence.
        baseline: what the plain baseline is.
        source: of the published values.
        differs: what can't be compared with them.
        measure: values of a seed.
    """

    name: str
    title: str
    data: str
    split: str
    metrics: tuple[Metric, ...]
    baseline: str
    source: str
    differs: str
    measure: Callable[[Work], dict[str, Value]]


def measured(
    benchmark: PublicBenchmark, data: Path, folder: Path, values: Path, seed: int, weights: str | None
) -> Measured:
    """The seed's values: those of the folder ``values``, or measured now, with its runs in ``folder``."""
    file = values / benchmark.name / f"{seed}.json"
    if file.exists():
        return Measured.model_validate_json(file.read_bytes())
    work = Work(data, folder / benchmark.name / str(seed), seed, weights)
    work.folder.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    result = Measured(
        values=benchmark.measure(work),
        commands=work.commands,
        seconds=time.perf_counter() - start_s,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        revision=revision(),
        versions=versions(["scikit-learn"]),
        machine=describe_machine(),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    # Last: the file says that the seed is done.
    write_atomically(file, result.model_dump_json(indent=1))
    return result


def read_measured(folder: Path) -> list[Measured]:
    """The seeds of a benchmark's values, in their order."""
    files = sorted(folder.glob("*.json"), key=lambda file: int(file.stem))
    return [Measured.model_validate_json(file.read_bytes()) for file in files]
