"""The picture of a GPU log: what each GPU did over time, where it was held up, and the diagnosis in words.

In: a log and its analysis. Out: one PNG. At the top a strip for each GPU with its phases, its idle gaps by cause and
its throttling; under it utilisation, memory, temperature, power and clocks; at the bottom the findings.
Of a machine without a GPU, its CPUs, memory and disk.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, heading, new_figure, save, style
from monitoring.gpu_log.analysis import Analysis, Finding, GpuDiagnosis
from monitoring.gpu_log.reader import GpuLog, Trace
from monitoring.gpu_log.throttling import HOT_C

_LINES = (BLUE, ORANGE, GREEN, "#7b5aa6", "#4ab4c4", "#8c564b", "#d6539b", "#5c7f3f", GREY)
_PHASES = {"start-up": "#c9d3df", "steady": "#dbeee3", "idle": "#f2c9c4", "checkpoint": "#fbe3b6", "end": "#dfe2e6"}
_PHASES["unused"] = _PHASES["end"]
_EVENTS = {
    "thermal_throttling": (RED, "too hot"),
    "power_throttling": (ORANGE, "at its power limit"),
    "loader_gaps": ("#7b5aa6", "waits for data"),
    "checkpoint_gaps": ("#d9a520", "writes a checkpoint"),
    "sync_gaps": ("#1f8a9c", "waits for other GPUs"),
    "periodic_gaps": ("#d9a520", "stops regularly"),
    "unknown_gaps": (INK, "idles, cause unknown"),
    "ecc_errors": ("#000000", "memory error"),
}
_OTHER_FINDING = "#8c564b"
_SHADED = {
    "util_percent": tuple(name for name in _EVENTS if name.endswith("_gaps")),
    "temperature_c": ("thermal_throttling",),
    "power_w": ("power_throttling",),
    "sm_clock_mhz": ("thermal_throttling", "power_throttling"),
}
"""Which findings each panel shades."""
_WIDTH, _PANEL, _LINE_INCHES = 12.0, 1.5, 0.185
_WRAP = 160
CONTINUED = "none"
"""Colour of a line that goes on with the one before."""
_MOST_POINTS = 3000
_GIB = 2.0**30
_BAND_PIXELS = 1.0
"""A gap of a second in a day is drawn this wide at the least."""


def draw_analysis(log: GpuLog, analysis: Analysis, path: Path | str) -> None:
    """Draw a log to ``path``, a PNG, which is replaced only when the new one is complete."""
    words = _words(analysis)
    gpus = len(log.gpus)
    strip = 0.55 + 0.27 * gpus if gpus else 0.0
    panels = 5 if gpus else 3
    text = 0.25 + _LINE_INCHES * len(words)
    heights = [*([strip] if gpus else []), *[_PANEL] * panels, text]
    figure = new_figure(_WIDTH, sum(heights) + 0.9, _title(log, analysis))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    unit, name = _time_unit(analysis.seconds)
    axes = [figure.add_subplot(grid[place]) for place in range(len(heights) - 1)]
    for other in axes[1:]:
        other.sharex(axes[0])
    if gpus:
        _draw_strip(axes[0], analysis, unit)
        _draw_gpus(axes[1:], log, analysis, unit)
    else:
        _draw_host(axes, log, unit)
    for panel in axes[:-1]:
        panel.tick_params(labelbottom=False)
    axes[-1].set_xlabel(f"{name} since {log.start}" if "-" in log.start or "/" in log.start else name, color=INK)
    axes[0].set_xlim(0, max(analysis.seconds, analysis.interval_s, 1e-3) / unit)
    _write(figure, figure.add_subplot(grid[-1]), words)
    save(figure, path)


def _title(log: GpuLog, analysis: Analysis) -> str:
    models = sorted({trace.name for trace in log.gpus if trace.name})
    what = f"{len(log.gpus)} x {', '.join(models)}" if models else f"{len(log.gpus)} GPUs" if log.gpus else "no GPU"
    return f"{log.path.name}: {what}"


def _draw_strip(axes: Axes, analysis: Analysis, unit: float) -> None:
    """A bar a GPU: phases in pale, what held it up in strong colours."""
    heading(axes, "Phases, and what held it up")
    seen: dict[str, Patch] = {}
    for place, diagnosis in enumerate(analysis.gpus):
        for phase in diagnosis.phases:
            colour = _PHASES[phase.kind]
            axes.barh(place, (phase.end_s - phase.start_s) / unit, left=phase.start_s / unit, height=0.8, color=colour)
            seen.setdefault(phase.kind, Patch(color=colour, label=phase.kind))
    for place, diagnosis in enumerate(analysis.gpus):
        for finding in diagnosis.findings:
            if finding.name in _EVENTS:
                colour, words = _EVENTS[finding.name]
                low = finding.name.endswith("_throttling")
                height, middle = (0.3, place + 0.25) if low else (0.5, place - 0.15)
                _bars(axes, finding, middle, height, colour, unit, analysis)
                seen.setdefault(words, Patch(color=colour, label=words))
    style(axes)
    axes.grid(False)
    axes.set_yticks(range(len(analysis.gpus)), [f"GPU {diagnosis.gpu}" for diagnosis in analysis.gpus])
    axes.set_ylim(len(analysis.gpus) - 0.4, -0.6)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(
        handles=list(seen.values()),
        ncols=len(seen),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.1,
        columnspacing=1.1,
        borderaxespad=0.1,
    )


def _bars(
    axes: Axes, finding: Finding, middle: float, height: float, colour: str, unit: float, analysis: Analysis
) -> None:
    least = max(analysis.seconds, 1e-3) * _BAND_PIXELS / (_WIDTH * 100)
    starts = [start / unit for start, _ in finding.spans_s]
    widths = [max(end - start, least) / unit for start, end in finding.spans_s]
    axes.barh([middle] * len(starts), widths, left=starts, height=height, color=colour, linewidth=0)


def _draw_gpus(panels: Sequence[Axes], log: GpuLog, analysis: Analysis, unit: float) -> None:
    util, memory, temperature, power, clocks = panels
    figures = ("util_percent", "mem_used_bytes", "temperature_c", "power_w", "sm_clock_mhz")
    titles = ("Utilisation (%)", "Memory in use (GiB)", "Temperature (°C)", "Power (W)", "SM clock (MHz)")
    for axes, figure, title in zip(panels, figures, titles, strict=True):
        heading(axes, title)
        style(axes)
        _shade(axes, analysis, figure, unit)
        for place, trace in enumerate(log.gpus):
            scale = _GIB if figure == "mem_used_bytes" else 1.0
            _line(axes, trace, figure, unit, _LINES[place % len(_LINES)], f"GPU {trace.gpu}", scale)
        if not axes.lines:
            axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", va="center", color=GREY)
    if len(log.gpus) > 1:
        util.legend(
            ncols=min(len(log.gpus), 8),
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            fontsize=8.5,
            labelcolor=INK,
            borderaxespad=0.1,
        )
    util.set_ylim(0, 103)
    _limit(memory, _highest(log.gpus, "mem_total_bytes") / _GIB, "total")
    if _highest(log.gpus, "temperature_c") >= HOT_C - 8:
        _limit(temperature, HOT_C, "hot")
    _limit(power, _highest(log.gpus, "power_limit_w"), "limit")
    _limit(clocks, _highest(log.gpus, "sm_clock_max_mhz"), "highest")
    for axes in (memory, power, clocks):
        axes.set_ylim(0, 1.06 * max(axes.get_ylim()[1], 1e-3))


def _draw_host(panels: Sequence[Axes], log: GpuLog, unit: float) -> None:
    cpu, memory, disk = panels
    for axes, title in zip(panels, ("CPUs (%)", "Memory in use (GiB)", "Disk (MB/s)"), strict=True):
        heading(axes, title)
        style(axes)
    for place, trace in enumerate(log.hosts):
        colour = _LINES[place % len(_LINES)]
        _line(cpu, trace, "cpu_percent", unit, colour, trace.host, 1.0)
        _line(memory, trace, "host_used_bytes", unit, colour, "all", _GIB)
        _line(memory, trace, "watched_rss_bytes", unit, ORANGE, "watched processes", _GIB)
        _line(disk, trace, "disk_read_bytes_per_s", unit, colour, "read", 1e6)
        _line(disk, trace, "disk_write_bytes_per_s", unit, ORANGE, "written", 1e6)
    cpu.set_ylim(0, 103)
    _limit(memory, _highest(log.hosts, "host_total_bytes") / _GIB, "total")
    for axes in (memory, disk):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper right")


def _line(axes: Axes, trace: Trace, figure: str, unit: float, colour: str, label: str, scale: float) -> None:
    if not trace.has(figure):
        return
    time_s, low, middle, high = _thinned(trace.time_s, trace.get(figure) / scale)
    if not np.array_equal(low, high, equal_nan=True):
        axes.fill_between(time_s / unit, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(time_s / unit, middle, color=colour, linewidth=1.1, label=label)


def _thinned(time_s: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At most so many points as the picture has room for, each with the lowest, mean and highest of its samples."""
    if len(values) <= _MOST_POINTS:
        return time_s, values, values, values
    edges = np.linspace(0, len(values), _MOST_POINTS // 2 + 1).astype(int)[:-1]
    known = np.isfinite(values)
    counts = np.add.reduceat(known, edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.add.reduceat(np.where(known, values, 0.0), edges) / counts
    low, high = np.fmin.reduceat(values, edges), np.fmax.reduceat(values, edges)
    return time_s[edges], low, means, high


def _shade(axes: Axes, analysis: Analysis, figure: str, unit: float) -> None:
    """What held it up, behind the figure that shows it; of a single GPU also its phases, which the strip has anyway."""
    if len(analysis.gpus) == 1:
        for phase in analysis.gpus[0].phases:
            if phase.kind != "steady":
                axes.axvspan(
                    phase.start_s / unit, phase.end_s / unit, color=_PHASES[phase.kind], alpha=0.55, linewidth=0
                )
    for diagnosis in analysis.gpus:
        for finding in diagnosis.findings:
            if finding.name in _SHADED.get(figure, ()):
                for start, end in finding.spans_s:
                    colour = _EVENTS[finding.name][0]
                    axes.axvspan(start / unit, end / unit, color=colour, alpha=0.16, linewidth=0)


def _limit(axes: Axes, value: float, words: str) -> None:
    if np.isfinite(value):
        axes.axhline(value, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{words} {value:,.0f}",
            (1.0, value),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
            annotation_clip=False,
        )


def _highest(traces: Sequence[Trace], figure: str) -> float:
    values = [float(np.nanmax(trace.get(figure))) for trace in traces if trace.has(figure)]
    return max(values, default=float("nan"))


def _words(analysis: Analysis) -> list[tuple[str, str]]:
    """The diagnosis as lines, each with its colour; a finding's is that of its bullet."""
    lines = [(note, GREY) for note in analysis.notes]
    advised: set[str] = set()
    for diagnosis in analysis.gpus:
        lines.append((summarise(diagnosis), INK))
        for finding in diagnosis.findings:
            colour = _EVENTS.get(finding.name, (_OTHER_FINDING, ""))[0]
            advice = f" To do: {finding.advice}." if finding.name not in advised else ""
            advised.add(finding.name)
            told = textwrap.wrap(f"{finding.message}.{advice}", _WRAP)
            lines += [(told[0], colour), *((line, CONTINUED) for line in told[1:])]
        lines += [(note, GREY) for note in diagnosis.notes]
    return lines


def summarise(diagnosis: GpuDiagnosis) -> str:
    """One GPU's figures in a line, without those that its log lacks; it ends by saying so if nothing is amiss."""
    figures = diagnosis.figures
    parts = []
    if "util_mean_percent" in figures:
        parts.append(f"utilisation {figures['util_mean_percent']:.0f} % at work")
    if "memory_peak_share" in figures:
        parts.append(
            f"peak memory {100 * figures['memory_peak_share']:.0f} % of {figures['memory_total_bytes'] / _GIB:.0f} GiB"
        )
    if "temperature_max_c" in figures:
        parts.append(f"at most {figures['temperature_max_c']:.0f} °C")
    if "power_mean_w" in figures:
        parts.append(f"{figures['power_mean_w']:.0f} W on average")
    if "clock_mean_share" in figures:
        parts.append(f"clocks at {100 * figures['clock_mean_share']:.0f} %")
    verdict = "" if diagnosis.findings else "; nothing is amiss"
    return f"GPU {diagnosis.gpu}: {', '.join(parts)}{verdict}"


def _write(figure: Figure, axes: Axes, lines: Sequence[tuple[str, str]]) -> None:
    axes.axis("off")
    for place, (line, colour) in enumerate(lines):
        height = 1.0 - (place + 0.5) / max(len(lines), 1)
        own = colour in (INK, GREY)
        weight = "bold" if colour == INK else "normal"
        kept: dict[str, Any] = {"fontsize": 9, "va": "center", "transform": axes.transAxes}
        axes.text(0.0 if own else 0.018, height, line, color=colour if own else INK, fontweight=weight, **kept)
        if not own and colour != CONTINUED:
            axes.text(0.006, height, "■", color=colour, **kept)


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 7200 else (3600.0, "hours")
