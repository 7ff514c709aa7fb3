"""Paths of a run's files, and the small files for communication between driver and workers.

<storage_path>/<name>/
    config.yaml          the resolved config
    metrics.jsonl        one line per step, validation and event
    curves.png           the curves
    checkpoints/         see run_folder.checkpoints
    nonfinite/           record ids of batches that gave NaN
    export/              the Hugging Face folder
    logs/                output of each worker
    tokenizer/, label_mappings.json   of a classifier: its tokens and the names of its classes
    wandb/, wandb_run_id
    outcome.json         how the run ended
    .lock                held by the process that trains
    .first-worker        held by worker 0 if it uses the same folder as the driver
    monitoring/          samples of every worker
    alerts.jsonl         warnings about problems
    memory_guard.json    number of parts that batches are split into since a step was out of memory
    stop.requested       written by the driver on a signal, read by rank 0
    resize.requested     likewise, to resume with another number of workers
"""

import json
import logging
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from esmeray.common.errors import expanded
from esmeray.common.publishing import write_atomically
from esmeray.common.remote import uri_of, work_path
from esmeray.train_config.section import STORES

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
"""Folder of a classifier's tokenizer, in a run and in its checkpoints."""
METRICS = "metrics.jsonl"
"""Only a run's folder contains this file, which distinguishes it from an export."""
EXPORT = "export"
"""Folder of a run's exported model, written at its end."""

LATEST = "latest"
"""File next to the checkpoints, with the name of the newest."""
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
RESERVE_BYTES = 16_384
"""Bytes reserved on the disk during training, so that the outcome can be written when the disk is full."""

Status = Literal["finished", "stopped", "resizing", "diverged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """End of a run, with the exit code of its process (:mod:`esmeray.common.errors`)."""

    status: Status
    step: int
    message: str
    exit_code: int


class RunFolder:
    """Paths of one run. If the storage path is a URI, paths of its working copy (:mod:`esmeray.run_folder.mirror`)."""

    def __init__(self, storage_path: str | Path, name: str):
        storage = uri_of(storage_path)
        self.uri = storage and f"{storage}/{name}"
        self.path = (work_path(storage) if storage else expanded(storage_path).resolve()) / name
        self.stores = self.path.parent / STORES
        self.config = self.path / "config.yaml"  # identifies the folder as a run
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
        self.outcome = self.path / "outcome.json"
        self.first_worker = self.path / ".first-worker"
        self._reserve = self.path / ".outcome.reserve"
        # Empty files are enough for requests, since workers on any machine see the folder.
        self.stop_request = self.path / "stop.requested"
        self.resize_request = self.path / "resize.requested"

    def end_requested(self) -> bool:
        """Return whether the workers should save and end after the current step."""
        return self.stop_request.exists() or self.resize_request.exists()

    def clear_requests(self) -> None:
        """Remove the outcome and the requests of an earlier attempt, and reserve space for this one's outcome."""
        # Otherwise the new attempt would stop at once, and followers would consider the run ended. Ray Train also fails
        # on its own snapshot if that is damaged or of another version.
        # One process at a time writes these files, so temporary names of them are a killed attempt's.
        single_writer = (self.outcome, self._reserve, self.config, self.wandb_run_id, self.checkpoints / LATEST)
        half_written = [left for path in single_writer for left in path.parent.glob(f".{path.name}.*.tmp")]
        for path in (self.stop_request, self.resize_request, self.outcome, self.path / RAY_SNAPSHOT, *half_written):
            path.unlink(missing_ok=True)
        if self.path.exists():
            write_atomically(self._reserve, bytes(RESERVE_BYTES))

    def write_outcome(self, outcome: Outcome) -> None:
        """Record how the run ended, also on a full disk."""
        self._reserve.unlink(missing_ok=True)  # first, to free the reserved blocks on a full disk
        write_atomically(self.outcome, json.dumps({**asdict(outcome), "crc32": _checksum(outcome)}, indent=2) + "\n")

    def read_outcome(self) -> Outcome | None:
        """Return the outcome of the run, or None if it has not ended."""
        try:
            content = json.loads(self.outcome.read_text())
            checksum = content.pop("crc32")
            outcome = Outcome(**content)
            if checksum != _checksum(outcome):  # a flipped bit in a digit would change the exit code
                raise ValueError("checksum mismatch")
            return outcome
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            logger.warning("%s is damaged (%s) and ignored", self.outcome, error)
            return None


def _checksum(outcome: Outcome) -> int:
    return zlib.crc32(json.dumps(asdict(outcome)).encode())


def sample_file(folder: Path, worker: int) -> Path:
    """Return the file of a worker's samples in a run's folder ``monitoring``."""
    return folder / f"worker-{worker:05d}.jsonl"


def sample_files(folder: Path) -> list[Path]:
    """Return the files of all workers' samples, by worker; none while the folder can't be read."""
    try:
        return sorted(folder.glob("worker-*.jsonl"))
    except OSError:  # a remote folder that is temporarily unreachable
        return []


def no_space(where: object) -> str:
    return (
        f"disk full, {where} could not be written: free some space, or lower checkpoint.keep_last; the same "
        "command then resumes from the last complete checkpoint"
    )
