"""Columns of a GPU log: Esmeray's own names and those of ``nvidia-smi --query-gpu``, and the numbers in their cells.

A column is never guessed: where one is missing that an analysis needs, the error names it, the most similar column,
and the columns of the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from common.errors import DataError

TIME, HOST, GPU, UUID, NAME = "time", "host", "gpu", "uuid", "name"
GPU_METRICS = (
    "util_percent",
    "mem_util_percent",
    "mem_used_bytes",
    "mem_total_bytes",
    "temperature_c",
    "power_w",
    "power_limit_w",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "memory_clock_mhz",
    "throttle_reasons",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s",
    "ecc_corrected",
    "ecc_uncorrected",
    "processes",
)
"""Of one GPU, named as in :class:`monitoring.sampling.nvml.GpuSample`."""
HOST_METRICS = (
    "cpu_percent",
    "host_total_bytes",
    "host_available_bytes",
    "host_used_bytes",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "net_sent_bytes_per_s",
    "net_received_bytes_per_s",
    "watched_rss_bytes",
    "watched_cpu_percent",
)
"""Of the whole machine, and (watched) of the processes given by ``--pid`` and their children."""
COLUMNS = (TIME, HOST, GPU, UUID, NAME, *GPU_METRICS, *HOST_METRICS)
"""Esmeray's own header, in order."""

_REQUIRED = (TIME, "util_percent", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz")
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    TIME: ("timestamp",),
    GPU: ("index",),
    UUID: ("gpu_uuid",),
    NAME: ("gpu_name",),
    "util_percent": ("utilization.gpu",),
    "mem_util_percent": ("utilization.memory",),
    "mem_used_bytes": ("memory.used",),
    "mem_total_bytes": ("memory.total",),
    "temperature_c": ("temperature.gpu",),
    "power_w": ("power.draw", "power.draw.average", "power.draw.instant"),
    "power_limit_w": ("enforced.power.limit", "power.limit"),
    "sm_clock_mhz": ("clocks.sm", "clocks.current.sm", "clocks.gr", "clocks.current.graphics"),
    "sm_clock_max_mhz": ("clocks.max.sm", "clocks.max.gr", "clocks.max.graphics"),
    "memory_clock_mhz": ("clocks.mem", "clocks.current.memory"),
    "throttle_reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
}
"""nvidia-smi's names, without the unit in brackets; of several the first one present is used."""
_REASON_BITS = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""nvidia-smi's columns of one reason each (``clocks_event_reasons.sw_power_cap``), with NVML's bit."""
_FACTORS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 1.0, "W": 1.0, "MHz": 1.0, "C": 1.0}
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%|[A-Za-z]+)?")
_UNKNOWN = ("", "N/A", "nan", "NaN")


def find_columns(titles: Sequence[str], path: Path) -> dict[str, str]:
    """Return the title of each known column of a log.

    Args:
        titles: the cells of the header, without spaces around them.
        path: of the log, for the error.

    Raises:
        DataError: a column is missing that an analysis needs.
    """
    by_name = {_bare(title): title for title in reversed(titles)}
    found: dict[str, str] = {}
    for name in COLUMNS:
        present = [candidate for candidate in (name, *_OTHER_NAMES.get(name, ())) if candidate in by_name]
        if present:
            found[name] = by_name[present[0]]
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        free = [title for title in titles if title not in found.values()]
        described = [" or ".join([name, *_OTHER_NAMES[name][:1]]) + _nearest(name, free) for name in missing]
        raise DataError(
            f"{path}: no column for {'; '.join(described)}. The log has: {', '.join(titles) or 'nothing'}. Rename what "
            "differs, or record by 'python -m tools gpu_monitor'"
        )
    return found


def reason_columns(titles: Sequence[str]) -> dict[str, int]:
    """Return the titles of nvidia-smi's columns of one throttle reason each, with NVML's bit."""
    pattern = re.compile(r"clocks_(?:event|throttle)_reasons\.(\w+)")
    matches = {title: pattern.fullmatch(_bare(title)) for title in titles}
    return {title: _REASON_BITS[m[1]] for title, m in matches.items() if m and m[1] in _REASON_BITS}


def numbers(cells: pd.Series, title: str) -> pd.Series:
    """Return the cells' values in bytes, percent, watts or MHz; NaN where the log says that one is not known.

    Raises:
        ValueError: a cell is no number or has an unknown unit; its second argument is the cell's index.
    """
    values = pd.to_numeric(cells, errors="coerce").astype(float) * _factor(title)
    known = ~cells.isin(_UNKNOWN) & ~cells.str.startswith("[")  # nvidia-smi: [N/A], [GPU is lost] ...
    for place in cells.index[known & values.isna()]:
        try:
            values[place] = _with_unit(cells[place], _factor(title))
        except ValueError as error:
            raise ValueError(str(error), place) from error
    return values


def reason_bits(cells: pd.Series, bit: int) -> pd.Series:
    """Return ``bit`` where a cell is Active, 0 where it is Not Active, NaN where it is not known.

    Raises:
        ValueError: a cell is something else; its second argument is the cell's index.
    """
    bits = cells.map({"Active": float(bit), "Not Active": 0.0})
    known = ~cells.isin(_UNKNOWN) & ~cells.str.startswith("[")
    for place in cells.index[known & bits.isna()]:
        raise ValueError(f"{cells[place]!r} is neither 'Active' nor 'Not Active'", place)
    return bits


def seconds(cells: pd.Series) -> pd.Series:
    """Return times in Unix seconds, from these or from dates as nvidia-smi or ISO 8601 write them (read as UTC).

    Raises:
        ValueError: a cell is no time; its second argument is the cell's index.
    """
    values = pd.to_numeric(cells, errors="coerce").astype(float)
    if values.isna().any():
        moments = pd.to_datetime(cells.str.replace("/", "-"), format="ISO8601", utc=True, errors="coerce")
        values = values.fillna((moments - pd.Timestamp(0, tz="UTC")).dt.total_seconds())
    for place in cells.index[values.isna()]:
        raise ValueError(f"{cells[place]!r} is not a time", place)
    return values


def _bare(title: str) -> str:
    """``utilization.gpu [%]`` without its unit."""
    return title.split("[")[0].strip()


def _factor(title: str) -> float:
    unit = re.search(r"\[(.+)\]", title)
    if unit:
        return _FACTORS.get(unit[1], 1.0)
    return _FACTORS["MiB"] if title.startswith("memory.") else 1.0  # nvidia-smi's unit, where its header lost it


def _with_unit(cell: str, factor: float) -> float:
    if cell.startswith("0x"):
        return float(int(cell, 16))
    match = _NUMBER.fullmatch(cell)
    if match is None or (match[2] is not None and match[2] not in _FACTORS):
        raise ValueError(f"{cell!r} is not a number")
    return float(match[1]) * (_FACTORS[match[2]] if match[2] else factor)


def _nearest(name: str, titles: Sequence[str]) -> str:
    """The column that has most words in common with ``name``, abbreviated ones included, in brackets."""
    words = name.split("_")

    def likeness(title: str) -> int:
        others = re.split(r"[^a-z0-9]+", _bare(title).lower())
        pairs = [(a, b) for a in words for b in others if min(len(a), len(b)) >= 3]
        return sum(a.startswith(b) or b.startswith(a) for a, b in pairs)

    nearest = max(titles, key=likeness, default="")
    return f" (nearest: {nearest})" if likeness(nearest) else ""
