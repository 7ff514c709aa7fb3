"""Reader of GPU logs, of ``python -m tools gpu_monitor`` or of nvidia-smi as CSV, into one table for each GPU."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import DataError
from monitoring.gpu_log.columns import (
    COLUMNS,
    GPU,
    GPU_METRICS,
    HOST,
    HOST_METRICS,
    NAME,
    TIME,
    UUID,
    find_columns,
    numbers,
    reason_bits,
    reason_columns,
    seconds,
)

_BURST_SHARE = 0.2
"""Rows nearer to each other than this share of the usual distance are of one sample."""


@dataclass(frozen=True)
class GpuLog:
    """A log as read.

    Attributes:
        path: of the file.
        start: the first sample's time as it stands in the file.
        gpus: by the GPU's label, in order of number: a table with the columns of COLUMNS, in order of time. ``time`` is
            in seconds since the log's first sample; a metric that is not known is NaN.
        hosts: by the machine's name: the same of its own metrics; empty where the log has none.
    """

    path: Path
    start: str
    gpus: dict[str, pd.DataFrame]
    hosts: dict[str, pd.DataFrame]


def read_gpu_log(path: Path | str) -> GpuLog:
    """Read a log, with or without units.

    A last line without its end, left by a killed writer, is passed over, and so are headers repeated by appending.

    Raises:
        DataError: the file can't be read, has no samples, lacks a column, or a cell is not what its column says.
    """
    path = Path(path)
    _refuse_samples_of_a_run(path)
    cells = _cells(path)
    columns = find_columns(list(cells), path)
    table = _values(cells, columns, path)
    is_gpu = (table[GPU] != "") | (table[UUID] != "") | (not {GPU, UUID} & set(columns))
    gpus = _by_gpu(table[is_gpu])
    if len(gpus) == 1 and not {GPU, UUID} & set(columns):
        _refuse_bursts(table[TIME], path)
    hosts = {
        str(host): rows.drop_duplicates(TIME)
        for host, rows in table.groupby(HOST)
        if rows[list(HOST_METRICS)].notna().any(axis=None)
    }
    return GpuLog(path, cells[columns[TIME]].iloc[0], gpus, hosts)


def _refuse_samples_of_a_run(path: Path) -> None:
    """Name the tool that shows the samples of a run, if ``path`` is these."""
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


def _cells(path: Path) -> pd.DataFrame:
    """The cells as text, by title; the index is the line's number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as a CSV log: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise DataError(f"{path}: is empty")
    lines = csv.reader(text[: text.rfind("\n") + 1].splitlines(), skipinitialspace=True)
    titles = [title.strip() for title in next(lines, [])]
    rows: dict[int, list[str]] = {}
    for number, line in enumerate(lines, start=2):
        row = [cell.strip() for cell in line]
        if row and row != titles:
            rows[number] = row
            if len(row) != len(titles):
                raise DataError(
                    f"{path}, line {number}: {len(row)} cells where the header has {len(titles)}; remove the line"
                )
    find_columns(titles, path)
    if not rows:
        raise DataError(f"{path}: has a header and no samples")
    return pd.DataFrame.from_dict(rows, orient="index", columns=titles, dtype=str).loc[
        :, ~pd.Index(titles).duplicated()
    ]


def _values(cells: pd.DataFrame, columns: dict[str, str], path: Path) -> pd.DataFrame:
    """All COLUMNS as numbers and names, in order of time, since a clock that was set back mixes rows."""

    def read(title: str, convert: Callable[..., pd.Series], *arguments: object) -> pd.Series:
        try:
            return convert(cells[title], *arguments)
        except ValueError as error:
            raise DataError(f"{path}, line {error.args[1]}, column {title!r}: {error.args[0]}") from error

    table = pd.DataFrame({TIME: read(columns[TIME], seconds)})
    for name in (HOST, GPU, UUID, NAME):
        table[name] = cells[columns[name]] if name in columns else ""
    for name in (*GPU_METRICS, *HOST_METRICS):
        table[name] = read(columns[name], numbers, columns[name]) if name in columns else np.nan
    reasons = reason_columns(list(cells))
    if reasons and "throttle_reasons" not in columns:
        bits = pd.DataFrame({title: read(title, reason_bits, bit) for title, bit in reasons.items()})
        table["throttle_reasons"] = bits.sum(axis=1, min_count=1)
    table = table.sort_values(TIME, kind="stable", ignore_index=True)
    table[TIME] -= table[TIME].iloc[0]
    return table[list(COLUMNS)]


def _by_gpu(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """One table for each GPU, by its index, else its UUID; with the machine's name where there are several."""
    label = table[GPU].where(table[GPU] != "", table[UUID]).replace("", "0")
    keys = sorted(
        set(zip(table[HOST], label, strict=True)), key=lambda key: (key[0], not key[1].isdecimal(), key[1].zfill(6))
    )
    several = table[HOST].nunique() > 1
    return {
        f"{host}:{gpu}" if several else gpu: table[(table[HOST] == host) & (label == gpu)].reset_index(drop=True)
        for host, gpu in keys
    }


def _refuse_bursts(times: pd.Series, path: Path) -> None:
    """Refuse rows of several GPUs that no column tells apart: they come in bursts."""
    steps = np.diff(times)
    if len(steps) >= 4 and (steps < _BURST_SHARE * np.percentile(steps, 95)).mean() > 0.25:
        raise DataError(
            f"{path}: rows come in bursts, as of several GPUs, and no column tells which is of which; record it with "
            "nvidia-smi's 'index' among the columns"
        )
