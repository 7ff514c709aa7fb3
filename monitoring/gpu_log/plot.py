"""Picture of a GPU log: utilisation, memory, temperature, power and clocks of each GPU.

Idle and throttled stretches are shaded in the panels that show them.
"""

from collections.abc import Sequence
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
_MOST_POINTS = 3000


class Panel(NamedTuple):
    """One metric over time: ``scale`` is the title's unit in the column's; the maximum of ``limit`` is drawn as a line.

    ``shaded`` names stretches of :attr:`GpuSummary.spans_s`.
    """

    title: str
    metric: str
    scale: float = 1.0
    limit: str = ""
    shaded: tuple[str, ...] = ()


_PANELS = (
    Panel("Utilisation (%)", "util_percent", shaded=("idle",)),
    Panel("Memory in use (GiB)", "mem_used_bytes", 2.0**30, "mem_total_bytes"),
    Panel("Temperature (°C)", "temperature_c", shaded=("thermal",)),
    Panel("Power (W)", "power_w", limit="power_limit_w", shaded=("power_capped",)),
    Panel("SM clock (MHz)", "sm_clock_mhz", limit="sm_clock_max_mhz", shaded=("thermal", "power_capped")),
)


def draw_log(log: GpuLog, summaries: Sequence[GpuSummary], path: Path | str) -> None:
    """Draw a log to ``path``, a PNG, which is replaced only when the new one is complete."""
    models = sorted({name for table in log.gpus.values() for name in table[NAME] if name})
    figure = new_figure(12, 8.5, f"{log.path.name}: {len(log.gpus)} x {', '.join(models) or 'GPU'}")
    seconds = max(float(table[TIME].iloc[-1]) for table in log.gpus.values())
    unit, name = (1.0, "s") if seconds < 180 else (60.0, "min") if seconds < 7200 else (3600.0, "h")
    every = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, panel in zip(every, _PANELS, strict=True):
        _draw(axes, panel, log, summaries, unit)
    every[-1].set_xlabel(f"Time ({name})", color=INK)
    every[-1].set_xlim(0, max(seconds, 1.0) / unit)
    legend(every[0], over_curves=True)
    save(figure, path)


def _draw(axes: Axes, panel: Panel, log: GpuLog, summaries: Sequence[GpuSummary], unit: float) -> None:
    heading(axes, panel.title)
    style(axes)
    for summary in summaries:
        for kind in panel.shaded:
            for start, end in summary.spans_s[kind]:
                axes.axvspan(start / unit, end / unit, color=_SHADES[kind], alpha=0.25, linewidth=0)
    for place, (label, table) in enumerate(log.gpus.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        _line(axes, table[TIME] / unit, table[panel.metric] / panel.scale, colour, f"GPU {label}")
    if panel.limit:
        limit = max(float(table[panel.limit].max()) for table in log.gpus.values()) / panel.scale
        if np.isfinite(limit):
            axes.axhline(limit, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 103 if panel.title.endswith("(%)") else 1.06 * axes.get_ylim()[1])


def _line(axes: Axes, times: pd.Series, values: pd.Series, colour: str, label: str) -> None:
    """A curve; of a long log the mean of groups of samples, in a band from their lowest to their highest."""
    group = np.arange(len(values)) // (len(values) // _MOST_POINTS + 1)
    grouped = values.groupby(group)
    at = times.groupby(group).first()
    if group[-1] < len(values) - 1:
        axes.fill_between(at, grouped.min(), grouped.max(), color=colour, alpha=0.25, linewidth=0)
    axes.plot(at, grouped.mean(), color=colour, linewidth=1.1, label=label)
