"""Batch sizes, or token budgets, beside each other: six panels, and a heatmap of all figures.

In: the summaries of :class:`inference.classifier_profile.BatchResult`. Out: PNGs. Those that ran out of memory are left
out of the panels, and are grey in the heatmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, NullLocator

from common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, heading, legend, new_figure, save, style

Row = dict[str, Any]

_GOODNESS = ListedColormap(colormaps["RdYlGn"](np.linspace(0.22, 0.78, 256)))
"""From the worst to the best, without the ends of the scale, on which dark words can't be read."""

_ALIKE = 0.02
"""Figures of one line that differ by no more than this share of the largest are called alike."""

_ROOM_ABOVE = 1.08
"""Height of a panel, in heights of what it shows."""


class Figure(NamedTuple):
    """One figure of a row: its name in the heatmap, how it is read, and whether more of it is better."""

    name: str
    read: Callable[[Row], float | None]
    more_is_better: bool


FIGURES = (
    Figure("latency per sample, mean (ms)", lambda row: row["latency_per_sample_ms"]["mean"], False),
    Figure("latency per sample, p95 (ms)", lambda row: row["latency_per_sample_ms"]["p95"], False),
    Figure("latency per batch, mean (ms)", lambda row: row["latency_per_batch_ms"]["mean"], False),
    Figure("latency per batch, p95 (ms)", lambda row: row["latency_per_batch_ms"]["p95"], False),
    Figure("latency per batch, p99 (ms)", lambda row: row["latency_per_batch_ms"]["p99"], False),
    Figure("samples/s", lambda row: row["samples_per_s"], True),
    Figure("batches/s", lambda row: row["batches_per_s"], True),
    Figure("tokens/s", lambda row: row["tokens_per_s"], True),
    Figure("CPU memory, peak (MB)", lambda row: row["cpu_memory_peak_mb"], False),
    Figure("GPU memory, peak (MB)", lambda row: row["gpu_memory_peak_mb"], False),
    Figure("samples/s per MB", lambda row: row["samples_per_s_per_mb"], True),
)


def draw_comparison(path: Path, rows: Sequence[Row], unit: str, title: str) -> None:
    """The six panels."""
    figure = new_figure(13, 7.2, title)
    panels = figure.subplots(2, 3).ravel()
    done = [row for row in rows if not row["error"]]
    places = [row[unit] for row in done]
    draws = (
        ("Latency per sample (ms)", lambda axes: _latency(axes, places, done, "latency_per_sample_ms")),
        ("Throughput (samples/s)", lambda axes: _line(axes, places, done, "samples_per_s", GREEN)),
        ("GPU memory (MB)", lambda axes: _gpu(axes, places, done)),
        ("CPU memory (MB, peak resident)", lambda axes: _line(axes, places, done, "cpu_memory_peak_mb", ORANGE)),
        ("Latency per batch (ms)", lambda axes: _latency(axes, places, done, "latency_per_batch_ms")),
        ("Samples/s per MB of memory", lambda axes: _line(axes, places, done, "samples_per_s_per_mb", BLUE)),
    )
    for axes, (text, draw) in zip(panels, draws, strict=True):
        heading(axes, text)
        style(axes)
        draw(axes)
        if places:
            axes.set_xscale("log", base=2)
            axes.set_xticks(places)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.margins(x=0.06)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_ylim(0, _ROOM_ABOVE * axes.dataLim.y1 if axes.dataLim.y1 > 0 else None)
        axes.set_xlabel(unit.replace("_", " "), color=INK)
        legend(axes)
    save(figure, path)


def draw_heatmap(path: Path, rows: Sequence[Row], unit: str, title: str) -> None:
    """Every figure of every row as a number, the best of its line green and bold, and the worst red."""
    values = np.array([[_value(figure, row) for row in rows] for figure in FIGURES], dtype=np.float64)
    known = [line for line, row in enumerate(values) if np.isfinite(row).any()] or range(len(FIGURES))
    figures, values = [FIGURES[line] for line in known], values[list(known)]
    canvas = new_figure(max(7.0, 3.6 + 1.15 * len(rows)), 1.6 + 0.46 * max(1, len(figures)), title)
    axes = canvas.subplots()
    goodness = _goodness(values, figures)
    image = axes.imshow(goodness, cmap=_GOODNESS, vmin=0, vmax=1, aspect="auto")
    scale = canvas.colorbar(image, ax=axes, fraction=0.03, pad=0.02, ticks=[0, 0.5, 1])
    scale.ax.set_yticklabels(["worst of\nits line", "halfway,\nor all alike", "best of\nits line"])
    scale.ax.tick_params(colors=INK, labelsize=9, length=0)
    scale.outline.set_visible(False)
    axes.set_facecolor("#d5d8dc")
    for line, column in np.ndindex(values.shape):
        text = _shown(float(values[line, column])) if np.isfinite(values[line, column]) else _missing(rows[column])
        weight = "bold" if goodness[line, column] == 1 else "normal"
        axes.text(column, line, text, ha="center", va="center", fontsize=8.5, color=INK, fontweight=weight)
    axes.set_xticks(range(len(rows)), [f"{row[unit]:,}" for row in rows])
    axes.set_yticks(range(len(figures)), [figure.name for figure in figures])
    axes.set_xlabel(unit.replace("_", " "), color=INK)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    save(canvas, path)


def _line(axes: Axes, places: Sequence[int], rows: Sequence[Row], name: str, colour: str) -> None:
    axes.plot(places, [row[name] for row in rows], color=colour, marker="o", markersize=4, linewidth=1.8)


def _latency(axes: Axes, places: Sequence[int], rows: Sequence[Row], name: str) -> None:
    found = {key: [row[name][key] for row in rows] for key in ("mean", "p5", "p50", "p95", "p99")}
    axes.plot(places, found["p99"], color=RED, marker="_", linewidth=1.0, label="p99")
    axes.fill_between(places, found["p5"], found["p95"], color=BLUE, alpha=0.18, linewidth=0, label="p5 to p95")
    axes.vlines(places, found["p5"], found["p95"], color=BLUE, alpha=0.5, linewidth=1.0)  # all that one size has
    axes.plot(places, found["mean"], color=ORANGE, marker="_", linewidth=1.2, linestyle="--", label="mean")
    axes.plot(places, found["p50"], color=BLUE, marker="o", markersize=4, linewidth=1.8, label="p50")


def _gpu(axes: Axes, places: Sequence[int], rows: Sequence[Row]) -> None:
    if not rows or rows[0]["gpu_memory_peak_mb"] is None:
        axes.text(0.5, 0.5, "no GPU", transform=axes.transAxes, ha="center", color=GREY, fontsize=12)
        axes.set_axis_off()
        return
    for name, label, colour in (("gpu_memory_peak_mb", "peak", RED), ("gpu_memory_allocated_mb", "allocated", GREY)):
        axes.plot(places, [row[name] for row in rows], color=colour, marker="o", markersize=4, label=label)


def _value(figure: Figure, row: Row) -> float:
    value = None if row["error"] else figure.read(row)
    return float("nan") if value is None else value


def _goodness(values: np.ndarray, figures: Sequence[Figure]) -> np.ndarray:
    """1 for the best of each line, 0 for the worst, 0.5 where all are about alike; NaN where there is none."""
    finite = np.isfinite(values)
    low = np.where(finite, values, np.inf).min(axis=1, keepdims=True)
    high = np.where(finite, values, -np.inf).max(axis=1, keepdims=True)
    differs = finite & (high - low > _ALIKE * high)
    share = np.divide(values - low, high - low, out=np.full_like(values, 0.5), where=differs)
    more_is_better = np.array([[figure.more_is_better] for figure in figures])
    return np.where(finite, np.where(more_is_better, share, 1 - share), np.nan)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _missing(row: Row) -> str:
    return "out of\nmemory" if row["error"] else ""
