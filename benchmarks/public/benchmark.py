"""A public benchmark: its data, the commands that measure it, and published values.

The values of each seed are a file in the page's folder, written when the seed is measured. A seed with a file is not
measured again, so a page can be resumed, also on another machine.
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


class Value(BaseModel):
    """A metric, with its 95 % interval over the records if there is one."""

    value: float
    interval: tuple[float, float] | None = None


class Measured(BaseModel):
    """One seed of a benchmark: its values, including baselines, and their origin."""

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
        commands: commands that were run, as the page shows them.
    """

    data: Path
    folder: Path
    seed: int
    weights: str | None
    commands: list[str] = field(default_factory=list)

    def run(self, command: str, makes: str | None = None) -> None:
        """Run ``esmeray COMMAND``, with FOLDER and DATA for the two folders. Raises DataError if it fails.

        ``makes``: its output in the folder. If a stopped seed has it already, nothing is run.
        """
        self.commands.append(f"esmeray {command}")
        if makes is not None and (self.folder / makes).exists():
            return
        words = shlex.split(command)
        arguments = [word.replace("FOLDER", str(self.folder)).replace("DATA", str(self.data)) for word in words]
        log = self.folder / "log.txt"
        with log.open("ab") as output:
            program = [sys.executable, "-m", "esmeray.tools", *arguments]
            code = subprocess.run(program, cwd=REPOSITORY, stdout=output, stderr=output, check=False).returncode
        if code:
            raise DataError(f"esmeray {shlex.join(arguments)}: ended with code {code}; its output is in {log}")

    def read(self, name: str) -> dict:
        """Return a JSON file of the folder."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @property
    def training(self) -> str:
        """Options of a training: folder, seed, and trained weights in place of the recipe's random ones."""
        options = f"--run.storage_path FOLDER --run.seed {self.seed}"
        if self.weights is None:
            return options
        sizes = " ".join(f"--model.backbone.{name} none" for name in ("layers", "hidden_size", "heads"))
        # Frozen: on a CPU a head is trained in minutes on features that are computed once.
        return f"{options} --model.backbone.source {shlex.quote(self.weights)} {sizes} --model.backbone.frozen true"


@dataclass(frozen=True)
class Metric:
    """A row of the page.

    Attributes:
        key: name among the values of a seed.
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
        about: data with origin and licence, split, plain baseline, source of the published values, and what is not
            comparable with them.
        measure: returns the values of a seed.
    """

    name: str
    title: str
    about: Mapping[str, str]
    metrics: tuple[Metric, ...]
    measure: Callable[[Work], dict[str, Value]]


def measured(benchmark: PublicBenchmark, work: Work, file: Path) -> Measured:
    """Return the values of a seed's file; measure them if there is none."""
    if file.exists():
        return Measured.model_validate_json(file.read_bytes())
    work.folder.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    result = Measured(
        values=benchmark.measure(work),
        commands=list(dict.fromkeys(work.commands)),  # several values may need the same one
        seconds=time.perf_counter() - start_s,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        revision=revision(),
        versions=versions(["scikit-learn"]),
        machine=describe_machine(),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    # Last, since the file says that the seed is done.
    write_atomically(file, result.model_dump_json(indent=1))
    return result


def read_measured(folder: Path) -> list[Measured]:
    """Return the measured seeds of a benchmark in their order."""
    files = sorted(folder.glob("*.json"), key=lambda file: int(file.stem))
    return [Measured.model_validate_json(file.read_bytes()) for file in files]
