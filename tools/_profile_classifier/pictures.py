"""Batch sizes, or token budgets, beside each other: six panels, and a heatmap of all figures.

In: the summaries of :class:`inference.classifier_profile.BatchResult`. Out: PNGs. Those that ran out of memory are left
out of the panels, and are grey in the heatmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from monitoring.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, heading, legend, new_figure, save, style

Row = dict[str, Any]


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
            axes.margins(x=0.05)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(unit.replace("_", " "), color=INK)
        legend(axes)
    save(figure, path)


def draw_heatmap(path: Path, rows: Sequence[Row], unit: str, title: str) -> None:
    """Every figure of every row as a number, the best of its line green and the worst red."""
    values = np.array([[_value(figure, row) for row in rows] for figure in FIGURES], dtype=np.float64)
    known = [line for line, row in enumerate(values) if np.isfinite(row).any()] or range(len(FIGURES))
    figures, values = [FIGURES[line] for line in known], values[list(known)]
    canvas = new_figure(max(7.0, 3.6 + 1.15 * len(rows)), 1.6 + 0.46 * max(1, len(figures)), title)
    axes = canvas.subplots()
    axes.imshow(_goodness(values, figures), cmap="RdYlGn", vmin=-0.4, vmax=1.4, aspect="auto")
    axes.set_facecolor("#d5d8dc")
    for line, column in np.ndindex(values.shape):
        text = _shown(float(values[line, column])) if np.isfinite(values[line, column]) else _missing(rows[column])
        axes.text(column, line, text, ha="center", va="center", fontsize=8.5, color=INK)
    axes.set_xticks(range(len(rows)), [f"{row[unit]:,}" for row in rows])
    axes.set_yticks(range(len(figures)), [figure.name for figure in figures])
    axes.set_xlabel(unit.replace("_", " "), color=INK)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    save(canvas, path)


def _line(axes: Axes, places: Sequence[int], rows: Sequence[Row], name: str, colour: str) -> None:
    axes.plot(places, [row[name] for row in rows], color=colour, marker="o", markersize=4, linewidth=1.8)


def _latency(axes: Axes, places: Sequence[int], rows: Sequence[Row], name: str) -> None:
    means = [row[name]["mean"] for row in rows]
    errors = [row[name]["std"] for row in rows]
    low = [min(mean, error) for mean, error in zip(means, errors, strict=True)]
    axes.errorbar(places, means, yerr=[low, errors], color=BLUE, marker="o", markersize=4, capsize=3, label="mean, std")
    for percentile, colour in (("p50", GREY), ("p95", ORANGE), ("p99", RED)):
        axes.plot(places, [row[name][percentile] for row in rows], color=colour, linewidth=1.0, label=percentile)


def _gpu(axes: Axes, places: Sequence[int], rows: Sequence[Row]) -> None:
    if not rows or rows[0]["gpu_memory_peak_mb"] is None:
        axes.text(0.5, 0.5, "no GPU", transform=axes.transAxes, ha="center", color=GREY, fontsize=12)
        axes.yaxis.set_visible(False)
        return
    for name, label, colour in (("gpu_memory_peak_mb", "peak", RED), ("gpu_memory_allocated_mb", "allocated", GREY)):
        axes.plot(places, [row[name] for row in rows], color=colour, marker="o", markersize=4, label=label)


def _value(figure: Figure, row: Row) -> float:
    value = None if row["error"] else figure.read(row)
    return float("nan") if value is None else value


def _goodness(values: np.ndarray, figures: Sequence[Figure]) -> np.ndarray:
    """1 for the best of each line, 0 for the worst, 0.5 where all are alike; NaN where there is none."""
    finite = np.isfinite(values)
    low = np.where(finite, values, np.inf).min(axis=1, keepdims=True)
    high = np.where(finite, values, -np.inf).max(axis=1, keepdims=True)
    share = np.divide(values - low, high - low, out=np.full_like(values, 0.5), where=finite & (high > low))
    more_is_better = np.array([[figure.more_is_better] for figure in figures])
    return np.where(finite, np.where(more_is_better, share, 1 - share), np.nan)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _missing(row: Row) -> str:
    return "out of\nmemory" if row["error"] else ""
