"""The CSV log of GPUs: a row for each GPU and sample, with what the machine did at that moment; its writer and reader.

In: samples of NVML and of the machine. Out: a file that :func:`read_gpu_log` gives back as arrays, as it does with one
of nvidia-smi. A sample is one write, so that a killed writer leaves at most one partial line, which the next one
drops and the reader passes over. On a machine without a GPU a sample is one row whose ``gpu`` is empty.

Shape legend: S samples of one GPU.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, DataError, ResourceError
from monitoring.gpu_log.columns import (
    COLUMNS,
    GPU,
    GPU_FIGURES,
    HOST,
    HOST_FIGURES,
    NAME,
    NAN,
    TIME,
    UUID,
    Column,
    find_columns,
    seconds,
)

if TYPE_CHECKING:
    from monitoring.sampling.nvml import GpuSample

Floats = NDArray[np.float64]

_HEADER = ",".join(COLUMNS).encode() + b"\n"
_TAIL_BYTES = 1 << 16
"""No line is nearly as long."""
_BURST_SHARE = 0.2
"""Rows nearer to each other than this share of the usual distance are of one sample."""


class GpuLogWriter:
    """Appends samples to a CSV file. One writer at a time.

    Args:
        path: the file; made if absent, its folder too, gone on with if it is such a log.

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

    def append(self, time_s: float, host: str, figures: Mapping[str, float], gpus: Sequence[GpuSample]) -> None:
        """Write one sample.

        Args:
            time_s: Unix seconds.
            host: the machine's name.
            figures: of the machine, by HOST_FIGURES; what is not known is left out.
            gpus: none on a machine without one, which gives a row for the machine alone.

        Raises:
            ResourceError: the disk is full, or the file is gone.
        """
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        machine = [_cell(figures.get(name)) for name in HOST_FIGURES]
        for gpu in gpus:
            values = [_cell(getattr(gpu, name)) for name in GPU_FIGURES]
            writer.writerow([f"{time_s:.3f}", host, gpu.index, gpu.uuid, gpu.name, *values, *machine])
        if not gpus:
            writer.writerow([f"{time_s:.3f}", host, "", "", "", *[""] * len(GPU_FIGURES), *machine])
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
            raise DataError(f"{self.path}: holds something else than a log of these columns; give another file")
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


@dataclass(frozen=True)
class Trace:
    """S samples of one GPU, or of a machine, in order of time.

    Attributes:
        gpu: its number in the log, as text; empty for a machine.
        name: the GPU's model; empty where the log has none.
        host: the machine's name; empty where the log has none.
        time_s: (S,) seconds since the log's first sample.
        figures: (S,) each, by GPU_FIGURES and HOST_FIGURES; NaN where not known. Those that no sample has are left out.
    """

    gpu: str
    name: str
    host: str
    time_s: Floats
    figures: Mapping[str, Floats]

    def get(self, figure: str) -> Floats:
        """(S,) values of a figure, NaN throughout where the log has none."""
        values = self.figures.get(figure)
        return np.full(len(self.time_s), np.nan) if values is None else values

    def has(self, *figures: str) -> bool:
        """Whether some sample has a value of each."""
        return all(figure in self.figures for figure in figures)


@dataclass(frozen=True)
class GpuLog:
    """A log as read.

    Attributes:
        path: of the file.
        start: the first sample's time as it stands in the file.
        gpus: one trace each, in order of number.
        hosts: one trace each, of the machines' own figures; empty where the log has none.
    """

    path: Path
    start: str
    gpus: tuple[Trace, ...]
    hosts: tuple[Trace, ...]


def read_gpu_log(path: Path | str) -> GpuLog:
    """Read a log of ``python -m tools gpu_monitor``, or of nvidia-smi as CSV, with or without units.

    A last line without its end, left by a killed writer, is passed over, and so are headers repeated by appending.

    Raises:
        DataError: the file can't be read, has no samples, lacks a column, or a cell is not what its column says.
    """
    path = Path(path)
    _refuse_samples_of_a_run(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as a CSV log: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise DataError(f"{path}: is empty")
    header_line, _, body = text[: text.rfind("\n") + 1].partition("\n")
    header = next(csv.reader([header_line], skipinitialspace=True), [])
    columns, reasons = find_columns(header, path)
    rows = _Rows(path, len(header), columns, reasons)
    for number, row in enumerate(csv.reader(body.splitlines(), skipinitialspace=True), start=2):
        if row and row != header:
            rows.take(number, row)
    return rows.log()


def _refuse_samples_of_a_run(path: Path) -> None:
    """A run samples its GPUs itself, to files that another tool shows.

    Raises:
        DataError: that is what this is; names the tool.
    """
    place = path.absolute()
    if place.is_dir() and (place / "config.yaml").exists():
        run = place
    elif place.match("monitoring/worker-*.jsonl"):
        run = place.parent.parent
    elif place.is_dir() and any(place.glob("worker-*.jsonl")):
        run = place.parent
    else:
        return
    raise DataError(f"{path}: these are the samples of a run, which are for python -m tools watch {run}")


@dataclass
class _Rows:
    """The cells of a log, gathered by GPU and machine."""

    path: Path
    width: int
    columns: Mapping[str, Column]
    reasons: Sequence[Column]
    start: str = ""
    gpus: dict[tuple[str, str, str], _Samples] = field(default_factory=lambda: defaultdict(_Samples))
    hosts: dict[str, _Samples] = field(default_factory=lambda: defaultdict(_Samples))

    def take(self, number: int, row: Sequence[str]) -> None:
        if len(row) != self.width:
            raise DataError(
                f"{self.path}, line {number}: {len(row)} cells where the header has {self.width}; remove the line"
            )
        time_s = self._time(number, row)
        self.start = self.start or row[self.columns[TIME].place].strip()
        host = self._text(row, HOST)
        index, uuid = self._text(row, GPU), self._text(row, UUID)
        machine = dict(self._numbers(number, row, HOST_FIGURES))
        if self.hosts[host].last_s != time_s:
            self.hosts[host].add(time_s, machine)
        if index or uuid or not (GPU in self.columns or UUID in self.columns):
            figures = dict(self._numbers(number, row, GPU_FIGURES))
            if self.reasons and "throttle_reasons" not in self.columns:
                figures["throttle_reasons"] = self._reasons(number, row)
            samples = self.gpus[host, index, "" if index else uuid]
            samples.name = samples.name or self._text(row, NAME)
            samples.add(time_s, {**figures, **machine})

    def log(self) -> GpuLog:
        """Everything taken, as arrays."""
        if not self.hosts:
            raise DataError(f"{self.path}: has a header and no samples")
        first_s = min(samples.first_s for samples in self.hosts.values())
        several = len(self.hosts) > 1
        keys = sorted(self.gpus, key=lambda key: (key[0], not key[1].isdecimal(), key[1].zfill(6), key[2]))
        if len(keys) == 1 and not (GPU in self.columns or UUID in self.columns):
            self._refuse_bursts(self.gpus[keys[0]])
        gpus = []
        for place, (host, index, uuid) in enumerate(keys):
            label = (index or uuid or str(place)) if not several else f"{host}:{index or uuid or place}"
            gpus.append(self.gpus[host, index, uuid].trace(label, host, first_s))
        hosts = [samples.trace("", host, first_s) for host, samples in sorted(self.hosts.items())]
        return GpuLog(self.path, self.start, tuple(gpus), tuple(trace for trace in hosts if trace.figures))

    def _refuse_bursts(self, samples: _Samples) -> None:
        """Rows of several GPUs that nothing tells apart come in bursts."""
        steps = np.diff(np.sort(np.array(samples.times)))
        if len(steps) >= 4:
            near = steps < _BURST_SHARE * np.percentile(steps, 95)
            if near.mean() > 0.25:
                raise DataError(
                    f"{self.path}: rows come in bursts, as of several GPUs, and no column tells which is of which; "
                    "record it with nvidia-smi's 'index' among the columns"
                )

    def _time(self, number: int, row: Sequence[str]) -> float:
        column = self.columns[TIME]
        try:
            return seconds(row[column.place])
        except ValueError as error:
            raise DataError(
                f"{self.path}, line {number}, column {column.title!r}: {row[column.place]!r} is not a time"
            ) from error

    def _text(self, row: Sequence[str], name: str) -> str:
        column = self.columns.get(name)
        return row[column.place].strip() if column else ""

    def _numbers(self, number: int, row: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, float]]:
        for name in names:
            column = self.columns.get(name)
            if column:
                yield name, self._number(number, row, column)

    def _reasons(self, number: int, row: Sequence[str]) -> float:
        bits = [self._number(number, row, column) for column in self.reasons]
        known = [int(bit) for bit in bits if bit == bit]
        return float(sum(known)) if known else NAN

    def _number(self, number: int, row: Sequence[str], column: Column) -> float:
        try:
            return column.number(row[column.place])
        except ValueError as error:
            raise DataError(f"{self.path}, line {number}, column {column.title!r}: {error}") from error


@dataclass
class _Samples:
    """Samples as they come."""

    name: str = ""
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        return min(self.times)

    @property
    def last_s(self) -> float | None:
        return self.times[-1] if self.times else None

    def add(self, time_s: float, figures: Mapping[str, float]) -> None:
        self.times.append(time_s)
        for name, value in figures.items():
            self.values.setdefault(name, []).append(value)

    def trace(self, gpu: str, host: str, first_s: float) -> Trace:
        """As arrays in order of time: a clock that was set back mixes rows."""
        times = np.array(self.times)
        order = np.argsort(times, kind="stable")
        figures = {name: np.array(values)[order] for name, values in self.values.items()}
        known = {name: values for name, values in figures.items() if np.isfinite(values).any()}
        return Trace(gpu, self.name, host, times[order] - first_s, known)


def _cell(value: float | None) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
