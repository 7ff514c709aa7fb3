"""Reader of GPU logs, CSV as ``nvidia-smi --query-gpu=... --format=csv`` writes it, into one table for each GPU.

A column is never guessed: where one is missing that an analysis needs, the error names it, the most similar column,
and the columns of the log.
"""

import difflib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from common.errors import DataError
from dataset.table import text_batches
from monitoring.gpu_log.columns import COLUMNS, FACTORS, GPU, NAME, REASON_BITS, REQUIRED, TIME, UUID

_NUMBER = r"(?P<hex>0x[0-9a-fA-F]+)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>%|[A-Za-z]+)?"


@dataclass(frozen=True)
class GpuLog:
    """A log as read.

    Attributes:
        path: of the file.
        start: the first sample's time as it stands in the file.
        gpus: by the GPU's number, in order: a table with the columns of COLUMNS, in order of time. ``time`` is in
            seconds since the log's first sample; a metric that is not known is NaN.
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
    titles = _find_titles(list(cells), path)
    table = _values(cells, titles, path)
    labels = sorted(set(table[GPU]), key=lambda label: (len(label), label))
    gpus = {label: table[table[GPU] == label].reset_index(drop=True) for label in labels}
    return GpuLog(path, cells[titles[TIME]].iloc[0], gpus)


def _cells(path: Path) -> pd.DataFrame:
    """The cells as text, by title; the index is the line's number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    batches = list(text_batches(io.BytesIO(data[: data.rfind(b"\n") + 1]), path, ","))
    if not batches:
        raise DataError(f"{path}: is empty")
    cells = pa.Table.from_batches(batches).to_pandas().rename(columns=str.strip)
    _find_titles(list(cells), path)
    cells = cells.apply(lambda column: column.str.strip())
    cells.index += 2  # lines from 1, the first is the header
    samples = cells[cells.iloc[:, 0] != cells.columns[0]]
    if samples.empty:
        raise DataError(f"{path}: has a header and no samples")
    return samples


def _find_titles(titles: list[str], path: Path) -> dict[str, str]:
    """The log's title of each column that it has."""
    by_name = {title.split("[")[0].strip(): title for title in titles}  # ``utilization.gpu [%]`` without its unit
    known: dict[str, str] = {}
    for name, column in COLUMNS.items():
        present = [title for title in (column.title, *column.other_titles) if title in by_name]
        if present:
            known[name] = by_name[present[0]]
    missing = [COLUMNS[name].title for name in REQUIRED if name not in known]
    if missing:
        free = [title for title in titles if title not in known.values()]
        described = "; ".join(title + _nearest(title, free) for title in missing)
        raise DataError(
            f"{path}: no column for {described}. The log has: {', '.join(titles)}. Query what is missing by "
            "`nvidia-smi --query-gpu`, or record with `esmeray profile gpu`"
        )
    return known


def _nearest(name: str, titles: list[str]) -> str:
    near = difflib.get_close_matches(name, titles, n=1, cutoff=0.4)
    return f" (nearest: {near[0]})" if near else ""


def _values(cells: pd.DataFrame, titles: dict[str, str], path: Path) -> pd.DataFrame:
    """All COLUMNS as numbers and names, in order of time, since a clock that was set back mixes rows."""

    def read(title: str, convert: Callable[[pd.Series], pd.Series], words: str) -> pd.Series:
        values = convert(cells[title])
        unknown = cells[title].isin(["", "N/A", "nan"]) | cells[title].str.startswith("[")  # [N/A], [GPU is lost] ...
        for line in cells.index[values.isna() & ~unknown]:
            raise DataError(f"{path}, line {line}, column {title!r}: {cells[title][line]!r} is not {words}")
        return values

    table = pd.DataFrame({TIME: read(titles[TIME], _seconds, "a time")})
    for name in [name for name in COLUMNS if name != TIME]:
        if name in (GPU, UUID, NAME):
            table[name] = cells[titles[name]] if name in titles else ""
        else:
            table[name] = read(titles[name], _numbers, "a number") if name in titles else np.nan
    matches = [re.match(r"clocks_(?:event|throttle)_reasons\.(\w+)", title) for title in cells]
    reasons = {match.string: REASON_BITS[match[1]] for match in matches if match and match[1] in REASON_BITS}
    if reasons and "throttle_reasons" not in titles:
        active = pd.DataFrame({title: read(title, _active, "'Active' or 'Not Active'") for title in reasons})
        table["throttle_reasons"] = (active * pd.Series(reasons)).sum(axis=1, min_count=1)
    table = table.dropna(subset=[TIME]).sort_values(TIME, kind="stable", ignore_index=True)
    table[TIME] -= table[TIME].iloc[0]
    return table


def _numbers(cells: pd.Series) -> pd.Series:
    """The cells in bytes, percent, watts or MHz, by the unit of the cell or else of the title; NaN for other text."""
    parts = cells.str.extract(f"^(?:{_NUMBER})$")
    unit = re.search(r"\[(.+)\]", str(cells.name))
    usual = FACTORS.get(unit[1], 1.0) if unit else 1.0
    factors = parts["unit"].map(FACTORS).where(parts["unit"].notna(), usual)
    bits = parts["hex"].map(lambda cell: int(cell, 16), na_action="ignore")
    return (pd.to_numeric(parts["number"]) * factors).fillna(bits).astype(float)


def _active(cells: pd.Series) -> pd.Series:
    """1 where a reason is active, 0 where it is not; NaN for other text."""
    return cells.map({"Active": 1.0, "Not Active": 0.0})


def _seconds(cells: pd.Series) -> pd.Series:
    """Seconds of dates as nvidia-smi writes them; NaN for other text."""
    moments = pd.to_datetime(cells.str.replace("/", "-"), format="ISO8601", utc=True, errors="coerce")
    return (moments - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
