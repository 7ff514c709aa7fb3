"""What rank 0 writes into metrics.jsonl; the other ranks write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_folder.metrics_log import MetricsLog


class RunLog:
    """The run's metrics.jsonl on rank 0, nothing elsewhere."""

    def __init__(self, path: Path, rank: int):
        self._log = MetricsLog(path) if rank == 0 else None

    def rewind(self, step: int) -> None:
        """Drop what was written after this step: it will be written again."""
        if self._log:
            self._log.rewind(step)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record."""
        if self._log:
            self._log.append({"kind": kind, "step": step, **values})

    def event(self, name: str, step: int, **details: Any) -> None:
        """Append an event."""
        self.write("event", step, event=name, **details)

    def close(self) -> None:
        """Close the file."""
        if self._log:
            self._log.close()
