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

from common.errors import ConfigError, DataError, ResourceError
from monitoring.gpu_log.columns import COLUMNS, GPU_METRICS, HOST_METRICS
from monitoring.sampling.nvml import GpuSample

_HEADER = ",".join(COLUMNS).encode() + b"\n"
_TAIL_BYTES = 1 << 16
"""Longer than any line."""


class GpuLogWriter:
    """Appends samples to a CSV file, which is made if absent, with its folder. One writer at a time.

    Raises DataError where the file is something else, ConfigError where neither its folder nor the one around that is
    there, ResourceError where it can't be written or another process writes it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        folder = self.path.absolute().parent
        if not folder.parent.is_dir():
            raise ConfigError(f"{self.path}: there is no folder {folder.parent}; make it first")
        try:
            folder.mkdir(exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}; give another file") from error
        try:
            self._prepare()
        except (DataError, ResourceError):
            self.close()
            raise

    def append(self, time_s: float, host: str, metrics: Mapping[str, float], gpus: Sequence[GpuSample]) -> None:
        """Write one sample, whole.

        Args:
            time_s: Unix seconds.
            host: name of the machine.
            metrics: its values, by HOST_METRICS; what is not known is left out.
            gpus: none on a machine without one, which gives a row for the machine alone.
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
        self._file.close()

    def __enter__(self) -> GpuLogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Lock the file; write the header to a new one; of an old one check it and drop a partial last line."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResourceError(f"{self.path}: another process logs to it; give another file") from error
        header = os.pread(self._file.fileno(), len(_HEADER), 0)
        if header != _HEADER and _HEADER.startswith(header):
            self._file.truncate(0)
            self._write(_HEADER)
        elif header != _HEADER:
            raise DataError(f"{self.path}: is not a log with these columns; give another file")
        start = max(0, self.path.stat().st_size - _TAIL_BYTES)
        tail = os.pread(self._file.fileno(), _TAIL_BYTES, start)
        self._file.truncate(start + tail.rfind(b"\n") + 1)

    def _write(self, data: bytes) -> None:
        try:
            written = self._file.write(data)
        except OSError as error:
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}") from error
        if written != len(data):
            raise ResourceError(f"{self.path}: only {written} of {len(data)} bytes were written; is the disk full?")


def _cell(value: float | None) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
