"""Plot of a GPU log: load, memory, temperature, power and clocks per GPU, with idle and throttled time shaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from esmeray.common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, legend, picture, style
from esmeray.monitoring.gpu_log.analysis import GpuSummary
from esmeray.monitoring.gpu_log.reader import NAME, TIME, GpuLog

_COLOURS = (BLUE, ORANGE, GREEN, "#7b5aa6", "#4ab4c4", "#8c564b", "#d6539b", "#5c7f3f", GREY)
_SHADES = {"idle": GREY, "thermal": RED, "power_capped": ORANGE}


class Panel(NamedTuple):
    """One metric over time, in units of ``scale``, with the maximum of ``limit`` as a line and shaded ``spans_s``."""

    title: str
    metric: str
    scale: float = 1.0
    limit: str = ""
    shaded: tuple[str, ...] = ()


_PANELS = (
    Panel("Utilisation (%)", "util", shaded=("idle",)),
    Panel("Memory in use (GiB)", "mem_used_bytes", 2.0**30, "mem_total_bytes"),
    Panel("Temperature (°C)", "temperature_c", shaded=("thermal",)),
    Panel("Power (W)", "power_w", limit="power_limit_w", shaded=("power_capped",)),
    Panel("SM clock (MHz)", "sm_clock_mhz", limit="sm_clock_max_mhz", shaded=("thermal", "power_capped")),
)


def draw_log(log: GpuLog, summaries: Sequence[GpuSummary], path: Path) -> None:
    models = sorted({name for table in log.gpus.values() for name in table[NAME] if name})
    with picture(path, 12, 8.5, f"{log.path.name}: {len(log.gpus)} x {', '.join(models) or 'GPU'}") as figure:
        seconds = max(float(table[TIME].iloc[-1]) for table in log.gpus.values())
        unit, name = (1.0, "s") if seconds < 180 else (60.0, "min") if seconds < 7200 else (3600.0, "h")
        all_axes = figure.subplots(len(_PANELS), 1, sharex=True)
        for axes, panel in zip(all_axes, _PANELS, strict=True):
            _draw(axes, panel, log, summaries, unit)
        all_axes[-1].set_xlabel(f"Time ({name})", color=INK)
        all_axes[-1].set_xlim(0, max(seconds, 1.0) / unit)
        legend(all_axes[0], over_curves=True)  # colours are the same in all panels


def _draw(axes: Axes, panel: Panel, log: GpuLog, summaries: Sequence[GpuSummary], unit: float) -> None:
    style(axes, panel.title)
    for summary in summaries:
        for kind in panel.shaded:
            for start, end in summary.spans_s[kind]:
                axes.axvspan(start / unit, end / unit, color=_SHADES[kind], alpha=0.25, linewidth=0)
    for number, (label, table) in enumerate(log.gpus.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            table[TIME] / unit, table[panel.metric] / panel.scale, color=colour, linewidth=1.1, label=f"GPU {label}"
        )
    if panel.limit:
        # One line for all GPUs: GPUs of a machine mostly have the same limit.
        limit = max(float(table[panel.limit].max()) for table in log.gpus.values()) / panel.scale
        if np.isfinite(limit):
            axes.axhline(limit, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    # Axes start at zero so that heights compare; 103 keeps a line at 100 % visible.
    axes.set_ylim(0, 103 if panel.title.endswith("(%)") else 1.06 * axes.get_ylim()[1])
