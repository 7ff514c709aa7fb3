"""Writer of the CSV log of GPUs: a row for each GPU and sample, with the machine's values at that moment.

A sample is one write, so that a killed writer leaves at most one partial line, which the next writer drops and the
reader passes over. On a machine without a GPU a sample is one row whose ``gpu`` is empty.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from common.errors import ConfigError, DataError, ResourceError
from monitoring.gpu_log.columns import COLUMNS, GPU_METRICS, HOST_METRICS

if TYPE_CHECKING:
    from monitoring.sampling.nvml import GpuSample

_HEADER = ",".join(COLUMNS).encode() + b"\n"
_TAIL_BYTES = 1 << 16
"""Longer than any line."""


class GpuLogWriter:
    """Appends samples to a CSV file. One writer at a time.

    Args:
        path: the file; made if absent, its folder too; appended to if it is such a log.

    Raises:
        DataError: the file is something else.
        ConfigError: neither its folder nor the one around that is there: the path is a mistake.
        ResourceError: it can't be written, or another process writes it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._descriptor = -1
        folder = self.path.absolute().parent
        if not folder.parent.is_dir():
            raise ConfigError(f"{self.path}: there is no folder {folder.parent}; make it first")
        if folder.parent == Path(folder.anchor) and not folder.exists():
            raise ConfigError(f"{self.path}: there is no folder {folder}; make it first")
        try:
            folder.mkdir(exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._lock()
            self._prepare()
        except (DataError, ResourceError):
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}; give another file") from error

    def append(self, time_s: float, host: str, metrics: Mapping[str, float], gpus: Sequence[GpuSample]) -> None:
        """Write one sample.

        Args:
            time_s: Unix seconds.
            host: the machine's name.
            metrics: of the machine, by HOST_METRICS; what is not known is left out.
            gpus: none on a machine without one, which gives a row for the machine alone.

        Raises:
            ResourceError: the disk is full, or the file is gone.
        """
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        machine = [_cell(metrics.get(name)) for name in HOST_METRICS]
        for gpu in gpus:
            values = [_cell(getattr(gpu, name)) for name in GPU_METRICS]
            writer.writerow([f"{time_s:.3f}", host, gpu.index, gpu.uuid, gpu.name, *values, *machine])
        if not gpus:
            writer.writerow([f"{time_s:.3f}", host, "", "", "", *[""] * len(GPU_METRICS), *machine])
        self._write(buffer.getvalue().encode())

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> GpuLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceError(f"{self.path}: another process logs to it; give another file") from error

    def _prepare(self) -> None:
        """Write the header to a new file; of an old one check it and drop a partial last line."""
        size = os.fstat(self._descriptor).st_size
        header = os.pread(self._descriptor, len(_HEADER), 0)
        if size == 0 or (size < len(_HEADER) and _HEADER.startswith(header)):
            os.ftruncate(self._descriptor, 0)
            self._write(_HEADER)
            return
        if header != _HEADER:
            raise DataError(f"{self.path}: is not a log with these columns; give another file")
        start = max(0, size - _TAIL_BYTES)
        tail = os.pread(self._descriptor, _TAIL_BYTES, start)
        os.ftruncate(self._descriptor, start + tail.rfind(b"\n") + 1)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}") from error
        if written != len(data):
            raise ResourceError(f"{self.path}: only {written} of {len(data)} bytes were written; is the disk full?")


def _cell(value: float | None) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
