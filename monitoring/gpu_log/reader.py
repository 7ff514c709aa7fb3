"""Reader of GPU logs, of ``python -m tools gpu_monitor`` or of nvidia-smi as CSV, into one table for each GPU.

A column is never guessed: where one is missing that an analysis needs, the error names it, the most similar column,
and the columns of the log.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import DataError
from monitoring.gpu_log.columns import COLUMNS, GPU, HOST, NAME, OTHER_NAMES, REASON_BITS, REQUIRED, TIME, UUID

_FACTORS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 1.0, "W": 1.0, "MHz": 1.0, "C": 1.0}
_NUMBER = r"(?P<hex>0x[0-9a-fA-F]+)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>%|[A-Za-z]+)?"
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
    """

    path: Path
    start: str
    gpus: dict[str, pd.DataFrame]


def read_gpu_log(path: Path | str) -> GpuLog:
    """Read a log, with or without units.

    A last line without its end, left by a killed writer, is passed over, and so are headers repeated by appending.
    Raises DataError where the file can't be read, has no samples of a GPU, lacks a column, or a cell is not what its
    column says.
    """
    path = Path(path)
    cells = _cells(path)
    columns = _find_columns(list(cells), path)
    table = _values(cells, columns, path)
    if {GPU, UUID} & set(columns):
        table = table[(table[GPU] != "") | (table[UUID] != "")]
    else:
        _refuse_bursts(table[TIME], path)
    if table.empty:
        raise DataError(f"{path}: has no GPU, only the machine's own metrics")
    return GpuLog(path, cells[columns[TIME]].iloc[0], _by_gpu(table))


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
    rows = {number: [cell.strip() for cell in line] for number, line in enumerate(lines, start=2)}
    rows = {number: row for number, row in rows.items() if row and row != titles}
    for number, row in rows.items():
        if len(row) != len(titles):
            problem = f"{len(row)} cells where the header has {len(titles)}"
            raise DataError(f"{path}, line {number}: {problem}; remove the line")
    _find_columns(titles, path)
    if not rows:
        raise DataError(f"{path}: has a header and no samples")
    return pd.DataFrame.from_dict(rows, orient="index", columns=titles, dtype=str)


def _find_columns(titles: list[str], path: Path) -> dict[str, str]:
    """The title of each known column of a log."""
    by_name = {title.split("[")[0].strip(): title for title in titles}  # ``utilization.gpu [%]`` without its unit
    found: dict[str, str] = {}
    for name in COLUMNS:
        present = [candidate for candidate in (name, *OTHER_NAMES.get(name, ())) if candidate in by_name]
        if present:
            found[name] = by_name[present[0]]
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        free = [title for title in titles if title not in found.values()]
        described = [" or ".join([name, *OTHER_NAMES[name][:1]]) + _nearest(name, free) for name in missing]
        raise DataError(
            f"{path}: no column for {'; '.join(described)}. The log has: {', '.join(titles) or 'nothing'}. Rename what "
            "differs, or record by 'python -m tools gpu_monitor'"
        )
    return found


def _nearest(name: str, titles: list[str]) -> str:
    near = difflib.get_close_matches(name, titles, n=1, cutoff=0.4)
    return f" (nearest: {near[0]})" if near else ""


def _values(cells: pd.DataFrame, columns: dict[str, str], path: Path) -> pd.DataFrame:
    """All COLUMNS as numbers and names, in order of time, since a clock that was set back mixes rows."""

    def read(title: str, convert: Callable[[pd.Series], pd.Series], words: str) -> pd.Series:
        values = convert(cells[title])
        unknown = cells[title].isin(["", "N/A", "nan"]) | cells[title].str.startswith("[")  # [N/A], [GPU is lost] ...
        for line in cells.index[values.isna() & ~unknown]:
            raise DataError(f"{path}, line {line}, column {title!r}: {cells[title][line]!r} is not {words}")
        return values

    table = pd.DataFrame({TIME: read(columns[TIME], _seconds, "a time")})
    for name in COLUMNS[1:]:
        if name in (HOST, GPU, UUID, NAME):
            table[name] = cells[columns[name]] if name in columns else ""
        else:
            table[name] = read(columns[name], _numbers, "a number") if name in columns else np.nan
    titles = [re.match(r"clocks_(?:event|throttle)_reasons\.(\w+)", title) for title in cells]
    reasons = {match.string: REASON_BITS[match[1]] for match in titles if match and match[1] in REASON_BITS}
    if reasons and "throttle_reasons" not in columns:
        active = pd.DataFrame({title: read(title, _active, "'Active' or 'Not Active'") for title in reasons})
        table["throttle_reasons"] = (active * pd.Series(reasons)).sum(axis=1, min_count=1)
    table = table.dropna(subset=[TIME]).sort_values(TIME, kind="stable", ignore_index=True)
    table[TIME] -= table[TIME].iloc[0]
    return table


def _numbers(cells: pd.Series) -> pd.Series:
    """The cells in bytes, percent, watts or MHz, by the unit of the cell or else of the title; NaN for other text."""
    parts = cells.str.extract(f"^(?:{_NUMBER})$")
    unit = re.search(r"\[(.+)\]", str(cells.name))
    factors = parts["unit"].map(_FACTORS).where(parts["unit"].notna(), _FACTORS.get(unit[1], 1.0) if unit else 1.0)
    bits = parts["hex"].map(lambda cell: int(cell, 16), na_action="ignore")
    return (pd.to_numeric(parts["number"]) * factors).fillna(bits).astype(float)


def _active(cells: pd.Series) -> pd.Series:
    """1 where a reason is active, 0 where it is not; NaN for other text."""
    return cells.map({"Active": 1.0, "Not Active": 0.0})


def _seconds(cells: pd.Series) -> pd.Series:
    """Unix seconds, from these or from dates as nvidia-smi or ISO 8601 write them (read as UTC); NaN for other text."""
    moments = pd.to_datetime(cells.str.replace("/", "-"), format="ISO8601", utc=True, errors="coerce")
    dates = (moments - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return pd.to_numeric(cells, errors="coerce").astype(float).fillna(dates)


def _by_gpu(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """One table for each GPU, by its index, else its UUID; with the machine's name where there are several."""
    label = table[GPU].where(table[GPU] != "", table[UUID]).replace("", "0")
    if table[HOST].nunique() > 1:
        label = table[HOST] + ":" + label
    return {name: table[label == name].reset_index(drop=True) for name in sorted(set(label), key=lambda n: (len(n), n))}


def _refuse_bursts(times: pd.Series, path: Path) -> None:
    """Refuse rows of several GPUs that no column distinguishes: they come in bursts."""
    steps = np.diff(times)
    if len(steps) >= 4 and (steps < _BURST_SHARE * np.percentile(steps, 95)).mean() > 0.25:
        raise DataError(
            f"{path}: rows come in bursts, as of several GPUs, and no column names the GPU of a row; record it with "
            "nvidia-smi's 'index' among the columns"
        )
