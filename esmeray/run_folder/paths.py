"""Paths of a run's files, and the small files by which driver and workers talk.

<storage_path>/<name>/
    config.yaml          the resolved config
    metrics.jsonl        a line a step, validation and event
    curves.png           the curves
    checkpoints/         see training.checkpoint
    nonfinite/           record ids of batches that gave NaN
    export/              the Hugging Face folder
    logs/                what each worker printed
    tokenizer/, label_mappings.json   of a classifier: what its tokens and classes are called
    wandb/, wandb_run_id
    outcome.json         how the run ended
    .lock                held by the process that trains
    .first-worker        held by worker 0 where it uses the same folder as the driver
    esmeray/monitoring/          samples of every worker
    alerts.jsonl         warnings of what went wrong
    memory_guard.json    into how many parts batches are split since a step was out of memory
    stop.requested       written by the driver on a signal, seen by rank 0
    resize.requested     likewise, for another number of workers
"""

import json
import logging
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from esmeray.common.errors import expanded
from esmeray.common.publishing import naming, write_atomically
from esmeray.common.remote import uri_of, work_path
from esmeray.train_config.section import STORES

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
"""Folder of a classifier's tokenizer, in a run and in its checkpoints."""
METRICS = "metrics.jsonl"
"""In a run's folder alone: by it a run is known from an export of one."""
EXPORT = "export"
"""Folder of a run's model, which the run writes at its end."""

RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
RESERVE_BYTES = 16_384
"""Room on the disk that a run keeps while it trains, so that a full disk can be reported."""

Status = Literal["finished", "stopped", "resizing", "diverged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """End of a run, with the exit code of its process (:mod:`esmeray.common.errors`)."""

    status: Status
    step: int
    message: str
    exit_code: int


class RunFolder:
    """Paths of one run. Where the storage path is a URI, those of a working copy (:mod:`esmeray.run_folder.mirror`)."""

    def __init__(self, storage_path: str | Path, name: str):
        storage = uri_of(storage_path)
        self.uri = storage and f"{storage}/{name}"
        self.path = (work_path(storage) if storage else expanded(storage_path).resolve()) / name
        self.stores = self.path.parent / STORES
        self.config = self.path / "config.yaml"  # by it a run is known from any other folder
        self.metrics = self.path / METRICS
        self.curves = self.path / "curves.png"
        self.checkpoints = self.path / "checkpoints"
        self.nonfinite = self.path / "nonfinite"
        self.export = self.path / EXPORT
        self.logs = self.path / "logs"
        self.tokenizer = self.path / TOKENIZER
        self.monitoring = self.path / "monitoring"
        self.alerts = self.path / "alerts.jsonl"
        self.memory_guard = self.path / "memory_guard.json"
        self.wandb_run_id = self.path / "wandb_run_id"
        self.lock = self.path / ".lock"
        self.outcome = self.path / "outcome.json"
        self.first_worker = self.path / ".first-worker"
        self._reserve = self.path / ".outcome.reserve"
        self._stop = self.path / "stop.requested"
        self._resize = self.path / "resize.requested"

    def request_stop(self) -> None:
        """Ask the workers to save and end after the step in progress."""
        self._stop.touch()  # a file, since workers on any machine see the folder, and nothing else is needed

    def request_resize(self) -> None:
        """Ask for the same, so that another number of workers may resume."""
        self._resize.touch()

    def stop_requested(self) -> bool:
        return self._stop.exists()

    def end_requested(self) -> bool:
        return self._stop.exists() or self._resize.exists()

    def clear_requests(self) -> None:
        """Forget how an earlier attempt ended and what was asked of it; keep room for how this one will end."""
        # Or the new attempt would stop at once, and whoever follows the run would take it for ended. Ray Train fails on
        # a snapshot of its own that is damaged, or of another version.
        for path in (self._stop, self._resize, self.outcome, self.path / RAY_SNAPSHOT):
            path.unlink(missing_ok=True)
        if self.path.exists():
            with naming(self._reserve):
                self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def write_outcome(self, outcome: Outcome) -> None:
        """Record how the run ended, also on a full disk."""
        self._reserve.unlink(missing_ok=True)  # first: its blocks are what a full disk still has
        write_atomically(self.outcome, json.dumps({**asdict(outcome), "crc32": _checksum(outcome)}, indent=2) + "\n")

    def read_outcome(self) -> Outcome | None:
        """The end of the run, or None while it has not ended."""
        try:
            content = json.loads(self.outcome.read_text())
            checksum = content.pop("crc32")
            outcome = Outcome(**content)
            if checksum != _checksum(outcome):  # a flipped bit in a digit would be another exit code
                raise ValueError("its checksum does not hold")
            return outcome
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            logger.warning("%s is damaged (%s) and passed over", self.outcome, error)
            return None


def _checksum(outcome: Outcome) -> int:
    return zlib.crc32(json.dumps(asdict(outcome)).encode())


def sample_file(folder: Path, worker: int) -> Path:
    """The file of a worker's samples in a run's folder ``monitoring``."""
    return folder / f"worker-{worker:05d}.jsonl"


def sample_files(folder: Path) -> list[Path]:
    """The files of all workers' samples, by worker; none while the folder can't be read."""
    try:
        return sorted(folder.glob("worker-*.jsonl"))
    except OSError:  # a remote folder that is away for a while
        return []


def no_space(where: object) -> str:
    return (
        f"the disk is full, {where} could not be written: free some space, or lower checkpoint.keep_last; the same "
        "command then resumes from the last complete checkpoint"
    )
