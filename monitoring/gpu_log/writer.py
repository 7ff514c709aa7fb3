"""Writer of a GPU log, as nvidia-smi writes it: a row for each GPU and sample.

A sample is one write, so that a killed writer leaves at most one partial line, which the next writer drops and the
reader passes over.
"""

import math
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from common.errors import ConfigError, DataError, ResourceError
from monitoring.gpu_log.columns import COLUMNS, FACTORS, GPU, NAME, TIME, UUID
from monitoring.sampling.nvml import GpuSample

_HEADER = ", ".join(column.header for column in COLUMNS.values()).encode() + b"\n"
_UNKNOWN = "[N/A]"


class GpuLogWriter:
    """Appends samples to a CSV file, which is made if absent, with its folder.

    Raises DataError where the file is something else, ConfigError where neither its folder nor the one around that is
    there, ResourceError where it can't be written.
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
        self._prepare()

    def append(self, time_s: float, gpus: Sequence[GpuSample]) -> None:
        """Write one sample, whole. ``time_s`` is in Unix seconds."""
        self._write("".join(_row(time_s, gpu) for gpu in gpus).encode())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "GpuLogWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Write the header to a new file; of an old one check it and drop a partial last line."""
        self._file.seek(0)
        present = self._file.read()
        if present and not present.startswith(_HEADER[: len(present)]):
            self.close()
            raise DataError(f"{self.path}: is not a log with these columns; give another file")
        self._file.truncate(present.rfind(b"\n") + 1)
        if b"\n" not in present:
            self._write(_HEADER)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file.fileno(), data)
        except OSError as error:
            raise ResourceError(f"{self.path}: can't be written: {error.strerror}") from error
        if written != len(data):
            raise ResourceError(f"{self.path}: only {written} of {len(data)} bytes were written; is the disk full?")


def _row(time_s: float, gpu: GpuSample) -> str:
    moment = datetime.fromtimestamp(time_s).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]  # local time, as nvidia-smi's
    cells = {TIME: moment, GPU: str(gpu.index), UUID: gpu.uuid, NAME: gpu.name}
    numbers = gpu.metrics()
    return ", ".join(cells.get(name) or _cell(name, numbers.get(name)) for name in COLUMNS) + "\n"


def _cell(name: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return _UNKNOWN
    if name == "throttle_reasons":
        return f"0x{int(value):016x}"
    unit = COLUMNS[name].unit
    number = value / FACTORS.get(unit, 1.0)
    text = f"{number:.2f}" if unit == "W" else f"{number:.0f}"
    return f"{text} {unit}".rstrip()
