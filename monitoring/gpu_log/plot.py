"""Picture of a GPU log: utilisation, memory, temperature, power and clocks of each GPU, and the findings below them.

Idle and throttled stretches are shaded in the panels that show them. Of a machine without a GPU: its CPUs, memory and
disk.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, heading, legend, new_figure, save, style
from monitoring.gpu_log.analysis import GpuSummary
from monitoring.gpu_log.columns import NAME, TIME
from monitoring.gpu_log.reader import GpuLog

_COLOURS = (BLUE, ORANGE, GREEN, "#7b5aa6", "#4ab4c4", "#8c564b", "#d6539b", "#5c7f3f", GREY)
_SHADES = {"idle": GREY, "thermal": RED, "power_capped": ORANGE}
_WIDTH, _PANEL, _LINE_INCHES, _WRAP = 12.0, 1.5, 0.19, 160
_MOST_POINTS = 3000


class Panel(NamedTuple):
    """One metric over time.

    Attributes:
        title: with the unit.
        metrics: columns to draw, with the words of each for the legend.
        scale: of the column's unit in the title's.
        limit: column whose maximum is drawn as a line.
        shaded: stretches of :attr:`GpuSummary.spans_s` to shade.
    """

    title: str
    metrics: dict[str, str]
    scale: float = 1.0
    limit: str = ""
    shaded: Sequence[str] = ()


_THROTTLED = ("thermal", "power_capped")
_GPU_PANELS = (
    Panel("Utilisation (%)", {"util_percent": ""}, shaded=("idle",)),
    Panel("Memory in use (GiB)", {"mem_used_bytes": ""}, 2.0**30, "mem_total_bytes"),
    Panel("Temperature (°C)", {"temperature_c": ""}, shaded=("thermal",)),
    Panel("Power (W)", {"power_w": ""}, limit="power_limit_w", shaded=("power_capped",)),
    Panel("SM clock (MHz)", {"sm_clock_mhz": ""}, limit="sm_clock_max_mhz", shaded=_THROTTLED),
)
_HOST_PANELS = (
    Panel("CPU utilisation (%)", {"cpu_percent": ""}),
    Panel(
        "Memory in use (GiB)",
        {"host_used_bytes": "all", "watched_rss_bytes": "watched processes"},
        2.0**30,
        "host_total_bytes",
    ),
    Panel("Disk (MB/s)", {"disk_read_bytes_per_s": "read", "disk_write_bytes_per_s": "written"}, 1e6),
)


def draw_log(log: GpuLog, summaries: Sequence[GpuSummary], path: Path | str) -> None:
    """Draw a log to ``path``, a PNG, which is replaced only when the new one is complete."""
    words = list(_words(summaries))
    panels, tables = (_GPU_PANELS, log.gpus) if log.gpus else (_HOST_PANELS, log.hosts)
    heights = [*[_PANEL] * len(panels), 0.25 + _LINE_INCHES * len(words)]
    figure = new_figure(_WIDTH, sum(heights) + 0.9, _title(log))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    seconds = max(float(table[TIME].iloc[-1]) for table in tables.values())
    unit, name = (1.0, "s") if seconds < 180 else (60.0, "min") if seconds < 7200 else (3600.0, "h")
    first: Axes | None = None
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(grid[place], sharex=first)
        first = first or axes
        _draw(axes, panel, tables, summaries, unit)
        axes.tick_params(labelbottom=place == len(panels) - 1)
    axes.set_xlabel(f"Time since {log.start} ({name})" if set("-/") & set(log.start) else f"Time ({name})", color=INK)
    axes.set_xlim(0, max(seconds, 1.0) / unit)
    text = figure.add_subplot(grid[-1])
    text.axis("off")
    for place, (line, colour, weight) in enumerate(words):
        height = 1.0 - (place + 0.5) / len(words)
        text.text(0, height, line, color=colour, fontweight=weight, fontsize=9, va="center", transform=text.transAxes)
    save(figure, path)


def _title(log: GpuLog) -> str:
    models = sorted({name for table in log.gpus.values() for name in table[NAME] if name})
    what = f"{len(log.gpus)} x {', '.join(models) or 'GPU'}" if log.gpus else "no GPU"
    return f"{log.path.name}: {what}"


def _draw(
    axes: Axes, panel: Panel, tables: dict[str, pd.DataFrame], summaries: Sequence[GpuSummary], unit: float
) -> None:
    heading(axes, panel.title)
    style(axes)
    for summary in summaries:
        for kind in panel.shaded:
            for start, end in summary.spans_s[kind]:
                axes.axvspan(start / unit, end / unit, color=_SHADES[kind], alpha=0.25, linewidth=0)
    colours = iter(_COLOURS * len(tables))
    for label, table in tables.items():
        for metric, words in panel.metrics.items():
            colour = next(colours)
            if table[metric].notna().any():
                who = words or (f"GPU {label}" if summaries else label)
                _line(
                    axes,
                    table[TIME] / unit,
                    table[metric] / panel.scale,
                    colour,
                    who if words or len(tables) > 1 else "",
                )
    if not axes.lines:
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", va="center", color=GREY)
    if panel.limit:
        limit = max(float(table[panel.limit].max()) for table in tables.values()) / panel.scale
        if np.isfinite(limit):
            axes.axhline(limit, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 103 if panel.title.endswith("(%)") else 1.06 * axes.get_ylim()[1])
    if len(panel.metrics) > 1 or panel.title.startswith("Utilisation"):
        legend(axes, over_curves=True)


def _line(axes: Axes, times: pd.Series, values: pd.Series, colour: str, label: str) -> None:
    """A curve; of a long log the mean of groups of samples, in a band from their lowest to their highest."""
    group = np.arange(len(values)) // (len(values) // _MOST_POINTS + 1)
    grouped = values.groupby(group)
    at = times.groupby(group).first()
    if group[-1] < len(values) - 1:
        axes.fill_between(at, grouped.min(), grouped.max(), color=colour, alpha=0.25, linewidth=0)
    axes.plot(at, grouped.mean(), color=colour, linewidth=1.1, label=label)


def _words(summaries: Sequence[GpuSummary]) -> Iterator[tuple[str, str, str]]:
    """Lines of text with colour and weight; advice that repeats is given once."""
    given: set[str] = set()
    for summary in summaries:
        yield str(summary), INK, "bold"
        for advice in summary.advice:
            text = advice.finding if advice.topic in given else str(advice)
            given.add(advice.topic)
            yield from ((f"   {line}", INK, "normal") for line in textwrap.wrap(text, _WRAP))
        yield from ((f"   {note}", GREY, "normal") for note in summary.notes)
    if not summaries:
        yield "The log has no GPU, only the machine's own metrics", GREY, "normal"
