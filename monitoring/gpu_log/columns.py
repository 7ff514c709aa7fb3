"""Which column of a GPU log holds which figure: Esmeray's own names, and those of ``nvidia-smi --query-gpu``.

In: the header of a CSV file. Out: a :class:`Column` for each figure, which turns a cell into a number. A figure that an
analysis can't do without and that no column has is an error that names it, what is nearest to it, and what is there;
a column is never guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.errors import DataError

TIME, HOST, GPU, UUID, NAME = "time", "host", "gpu", "uuid", "name"
GPU_FIGURES = (
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
HOST_FIGURES = (
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
"""Of the whole machine, and (watched) of the processes that were asked for and their children."""
COLUMNS = (TIME, HOST, GPU, UUID, NAME, *GPU_FIGURES, *HOST_FIGURES)
"""Esmeray's own header, in order."""
REQUIRED = (
    TIME,
    "util_percent",
    "mem_used_bytes",
    "mem_total_bytes",
    "temperature_c",
    "power_w",
    "sm_clock_mhz",
)
"""What an analysis can't do without."""

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
"""nvidia-smi's names, without the unit in brackets; of several the first that is there counts."""
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
_UNKNOWN = {"", "N/A", "nan", "NaN"}
NAN = float("nan")


@dataclass(frozen=True)
class Column:
    """Where a figure stands in a row, and how to read it.

    Attributes:
        place: of the cell in its row.
        title: as it stands in the header.
        factor: what a number without a unit of its own is multiplied by.
        bit: of a column that tells of one throttle reason in words; else 0.
    """

    place: int
    title: str
    factor: float = 1.0
    bit: int = 0

    def number(self, cell: str) -> float:
        """The cell's value in the figure's unit; NaN where the log says that it is not known.

        Raises:
            ValueError: it is no number, or its unit is not known.
        """
        cell = cell.strip()
        if cell in _UNKNOWN or cell.startswith("["):  # nvidia-smi: [N/A], [Not Supported], [GPU is lost] ...
            return NAN
        if self.bit:
            return self._reason(cell)
        if cell.startswith("0x"):
            return float(int(cell, 16))
        match = _NUMBER.fullmatch(cell)
        if match is None or (match[2] is not None and match[2] not in _FACTORS):
            raise ValueError(f"{cell!r} is not a number")
        return float(match[1]) * (_FACTORS[match[2]] if match[2] else self.factor)

    def _reason(self, cell: str) -> float:
        if cell not in ("Active", "Not Active"):
            raise ValueError(f"{cell!r} is neither 'Active' nor 'Not Active'")
        return float(self.bit if cell == "Active" else 0)


def seconds(cell: str) -> float:
    """A time: Unix seconds, or a date and time as nvidia-smi or ISO 8601 write it (of which only differences count).

    Raises:
        ValueError: it is neither.
    """
    cell = cell.strip()
    try:
        return float(cell)
    except ValueError:
        moment = datetime.fromisoformat(cell.replace("/", "-"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def find_columns(header: Sequence[str], path: Path) -> tuple[dict[str, Column], list[Column]]:
    """The column of each figure, and those that tell of one throttle reason each.

    Args:
        header: the cells of the first line.
        path: of the log, for the error.

    Raises:
        DataError: one of REQUIRED has no column.
    """
    titles = [title.strip() for title in header]
    places = {_bare(title): place for place, title in reversed(list(enumerate(titles)))}
    found: dict[str, Column] = {}
    for name in COLUMNS:
        for candidate in (name, *_OTHER_NAMES.get(name, ())):
            if candidate in places:
                place = places[candidate]
                found[name] = Column(place, titles[place], _factor(titles[place], candidate))
                break
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        taken = {column.title for column in found.values()}
        raise DataError(_refusal(path, missing, titles, [title for title in titles if title not in taken]))
    return found, list(_reason_columns(titles))


def _bare(title: str) -> str:
    """``utilization.gpu [%]`` without its unit."""
    return title.split("[")[0].strip()


def _factor(title: str, name: str) -> float:
    unit = re.search(r"\[(.+)\]", title)
    if unit:
        return _FACTORS.get(unit[1], 1.0)
    return _FACTORS["MiB"] if name.startswith("memory.") else 1.0  # nvidia-smi's unit, where its header lost it


def _reason_columns(titles: Sequence[str]) -> Iterator[Column]:
    for place, title in enumerate(titles):
        family, _, reason = _bare(title).partition(".")
        if family in ("clocks_event_reasons", "clocks_throttle_reasons") and reason in _REASON_BITS:
            yield Column(place, title, bit=_REASON_BITS[reason])


def _refusal(path: Path, missing: Sequence[str], titles: Sequence[str], free: Sequence[str]) -> str:
    described = []
    for name in missing:
        known_as = " or ".join([name, *_OTHER_NAMES[name][:1]])
        near = _nearest(name, free)
        described.append(f"{known_as} (nearest: {', '.join(near)})" if near else known_as)
    return (
        f"{path}: no column for {'; '.join(described)}. The log has: {', '.join(titles) or 'nothing'}. Rename what "
        "differs, or record by 'python -m tools gpu_monitor'"
    )


def _nearest(name: str, titles: Sequence[str]) -> list[str]:
    """Up to two columns whose names look like the figure's."""
    wanted = [_words(known) for known in (name, *_OTHER_NAMES.get(name, ()))]
    scores = {title: max(_likeness(words, _words(title)) for words in wanted) for title in titles if title}
    ranked = sorted(scores, key=lambda title: -scores[title])
    return [title for title in ranked[:2] if scores[title] >= 0.6]


def _words(title: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", _bare(title).lower()) if word]


def _likeness(one: Sequence[str], other: Sequence[str]) -> float:
    """Of the names as a whole, or of their first words: what is counted says more than its unit."""
    if not one or not other:
        return 0.0
    whole = difflib.SequenceMatcher(None, "_".join(one), "_".join(other)).ratio()
    return max(whole, *(0.95 * _word_likeness(one[0], word) for word in other))


def _word_likeness(one: str, other: str) -> float:
    if min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one)):  # temp, temperature
        return 1.0
    return difflib.SequenceMatcher(None, one, other).ratio()
