"""Reader of GPU logs (CSV of ``nvidia-smi --query-gpu=... --format=csv``): one table per GPU.

Columns are never guessed: if one is missing, the error names it, the most similar column, and all columns of the log.
"""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from esmeray.common.errors import DataError, did_you_mean, reading
from esmeray.dataset.table import csv_rows

TIME, GPU, NAME = "time", "index", "name"
COLUMNS = {
    TIME: ("timestamp",),
    GPU: ("index",),
    NAME: ("name", "gpu_name"),
    "util": ("utilization.gpu",),
    "mem_used_bytes": ("memory.used",),
    "mem_total_bytes": ("memory.total",),
    "temperature_c": ("temperature.gpu",),
    "power_w": ("power.draw", "power.draw.average", "power.draw.instant"),
    "power_limit_w": ("enforced.power.limit", "power.limit"),
    "sm_clock_mhz": ("clocks.current.sm", "clocks.sm", "clocks.gr", "clocks.current.graphics"),
    "sm_clock_max_mhz": ("clocks.max.sm", "clocks.max.gr", "clocks.max.graphics"),
    "throttle_reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total",),
}
"""nvidia-smi's names of each metric (:mod:`esmeray.monitoring.sampling.metric_names`); the first present one is
read."""
REQUIRED = (TIME, GPU, "util", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz")
REASON_BITS = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""nvidia-smi's columns for a single reason (``clocks_event_reasons.sw_power_cap``), with NVML's bit."""
FACTORS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 1.0, "W": 1.0, "MHz": 1.0, "C": 1.0}
"""Factors to convert units to the metrics' units."""
_NUMBER = r"(?P<hex>0x[0-9a-fA-F]+)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>%|[A-Za-z]+)?"


class GpuLog(NamedTuple):
    """A parsed log.

    Attributes:
        start: time of the first sample, as written in the file.
        gpus: tables by GPU number, in order, with the columns of COLUMNS, sorted by time. ``time`` is in seconds since
            the log's first sample; unknown metrics are NaN.
    """

    path: Path
    start: str
    gpus: dict[str, pd.DataFrame]


def read_gpu_log(path: Path) -> GpuLog:
    """Read a log, with or without units.

    An unfinished last line, left by a killed writer, and headers repeated by appending are skipped. Raises DataError if
    the file can't be read, has no samples of a GPU, lacks a column, or a cell does not match its column.
    """
    with reading(path):
        data = path.read_bytes()
    rows = list(csv_rows(io.BytesIO(data[: data.rfind(b"\n") + 1]), path, ","))
    if not rows:
        raise DataError(f"{path}: the log is empty")
    # nvidia-smi puts a blank after each comma.
    cells = pd.DataFrame(rows[1:], columns=rows[0], dtype=str).rename(columns=str.strip)
    titles = _find_titles(list(cells), path)
    cells = cells.apply(lambda column: column.str.strip())
    cells.index += 2  # line numbers start at 1, the first is the header
    cells = cells[cells.iloc[:, 0] != cells.columns[0]]  # repeated headers of an nvidia-smi that appended
    if cells.empty:
        raise DataError(f"{path}: the log has a header but no samples")
    # Sorted by length first: indices are strings here, and "10" comes after "9".
    by_gpu = sorted(_values(cells, titles, path).groupby(GPU), key=lambda item: (len(item[0]), item[0]))
    return GpuLog(path, cells[titles[TIME]].iloc[0], {gpu: rows.reset_index(drop=True) for gpu, rows in by_gpu})


def _find_titles(titles: list[str], path: Path) -> dict[str, str]:
    """Return the log's title of each column that it has."""
    by_name = {title.split("[")[0].strip(): title for title in titles}  # ``utilization.gpu [%]`` without its unit
    # In reverse, so that the first present name is kept.
    known = {
        name: by_name[query] for name, queries in COLUMNS.items() for query in reversed(queries) if query in by_name
    }
    missing = [COLUMNS[name][0] for name in REQUIRED if name not in known]
    if missing:
        # Columns already matched are not suggested as nearest.
        free = [name for name, title in by_name.items() if title not in known.values()]
        described = "; ".join(title + did_you_mean(title, free) for title in missing)
        raise DataError(
            f"{path}: no column for {described}. The log has: {', '.join(titles)}. Add the missing "
            "columns to `nvidia-smi --query-gpu`; `esmeray profile log --help` lists them"
        )
    return known


def _values(cells: pd.DataFrame, titles: dict[str, str], path: Path) -> pd.DataFrame:
    """Return all COLUMNS as numbers and names, sorted by time: a clock that was set back mixes rows."""

    def read(title: str, convert: Callable[[pd.Series], pd.Series], words: str) -> pd.Series:
        values = convert(cells[title])
        unknown = cells[title].isin(["", "N/A", "nan"]) | cells[title].str.startswith("[")  # [N/A], [GPU is lost] ...
        for line in cells.index[values.isna() & ~unknown]:
            raise DataError(f"{path}, line {line}, column {title!r}: {cells[title][line]!r} is not {words}")
        return values

    table = pd.DataFrame(
        {
            TIME: read(titles[TIME], _seconds, "a time"),
            GPU: cells[titles[GPU]],
            NAME: cells[titles[NAME]] if NAME in titles else "",
        }
    )
    for name in [name for name in COLUMNS if name not in table]:
        # Columns that the log lacks are NaN, so that callers need no check.
        table[name] = read(titles[name], _numbers, "a number") if name in titles else np.nan
    # Older queries have a column of words per reason; newer ones have all bits in one column.
    matches = [re.fullmatch(r"clocks_(?:event|throttle)_reasons\.(\w+)", title) for title in cells]
    bits = {match[0]: REASON_BITS[match[1]] for match in matches if match and match[1] in REASON_BITS}
    if bits and "throttle_reasons" not in titles:
        states = {"Active": 1.0, "Not Active": 0.0}
        active = pd.DataFrame(
            {title: read(title, lambda cells: cells.map(states), "'Active' or 'Not Active'") for title in bits}
        )
        # min_count: if no reason is known, the sample is unknown (NaN), not 0.
        table["throttle_reasons"] = (active * pd.Series(bits)).sum(axis=1, min_count=1)
    table = table.dropna(subset=[TIME]).sort_values(TIME, kind="stable", ignore_index=True)
    table[TIME] -= table[TIME].iloc[0]
    return table


def _numbers(cells: pd.Series) -> pd.Series:
    """Return cells in bytes, percent, watts or MHz, by the unit of the cell or of the title; NaN for other text."""
    parts = cells.str.extract(f"^(?:{_NUMBER})$")
    unit = re.search(r"\[(.+)\]", str(cells.name))
    usual = FACTORS.get(unit[1], 1.0) if unit else 1.0  # --format=csv,nounits has the unit in the title only
    factors = parts["unit"].map(FACTORS).where(parts["unit"].notna(), usual)
    bits = parts["hex"].map(lambda cell: int(cell, 16), na_action="ignore")
    return (pd.to_numeric(parts["number"]) * factors).fillna(bits).astype(float)


def _seconds(cells: pd.Series) -> pd.Series:
    """Return seconds of dates in nvidia-smi's format; NaN for other text."""
    moments = pd.to_datetime(cells.str.replace("/", "-"), format="ISO8601", utc=True, errors="coerce")
    return (moments - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
