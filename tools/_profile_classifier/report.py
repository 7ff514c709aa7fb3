"""A profile for a reader: the questions that people have with their answers, a table, six panels, and a heatmap.

In: the profile as plain values, as baseline_metrics.json has it. Out: lines of text, and PNGs. Batch sizes that ran out
of memory are left out of the panels, and are grey in the heatmap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, NullLocator

from common.figure_style import BLUE, GREEN, GREY, INK, ORANGE, RED, heading, legend, new_figure, save, style
from common.text import counted

Row = Mapping[str, Any]
_NOT_MEASURED = "not measured (step {0}; run it with --steps {0})"
_GOODNESS = ListedColormap(colormaps["RdYlGn"](np.linspace(0.22, 0.78, 256)))
"""From the worst to the best, without the ends of the scale, on which dark words can't be read."""

_ALIKE = 0.02
"""Values of one line that differ by no more than this share of the largest are called alike."""

_ROOM_ABOVE = 1.08
"""Height of a panel, in heights of what it shows."""


class Metric(NamedTuple):
    """A line of the heatmap: its name, where it is in a row, and whether more of it is better."""

    name: str
    keys: tuple[str, ...]
    more_is_better: bool


METRICS = (
    Metric("latency per sample, mean (ms)", ("latency_per_sample_ms", "mean"), False),
    Metric("latency per sample, p95 (ms)", ("latency_per_sample_ms", "p95"), False),
    Metric("latency per batch, mean (ms)", ("latency_per_batch_ms", "mean"), False),
    Metric("latency per batch, p95 (ms)", ("latency_per_batch_ms", "p95"), False),
    Metric("latency per batch, p99 (ms)", ("latency_per_batch_ms", "p99"), False),
    Metric("samples/s", ("samples_per_s",), True),
    Metric("batches/s", ("batches_per_s",), True),
    Metric("tokens/s", ("tokens_per_s",), True),
    Metric("CPU memory, peak (MB)", ("cpu_memory_peak_mb",), False),
    Metric("GPU memory, peak (MB)", ("gpu_memory_peak_mb",), False),
    Metric("samples/s per MB", ("samples_per_s_per_mb",), True),
)


def summary_lines(profile: Mapping[str, Any]) -> list[str]:
    """The whole report."""
    model, steps = profile["model"], profile["steps"]
    answers = [*_batch_answers(steps.get("batch_sizes")), *_whole_answers(steps.get("whole_file"))]
    lines = [
        f"Profile of {profile['subject']['model']}",
        f"{model['architecture']}, {model['parameters']:,} parameters, {model['model_size_mb']:,.1f} MB, "
        f"{model['kind']} with {model['outputs']} outputs",
        f"on {model['device']} in {model['amp_dtype']}, {model['threads']} threads, torch {model['torch']}",
        f"data: {profile['subject']['data']}, {counted(profile['data']['samples'], 'sample{s}')}, "
        f"{profile['data']['tokens_per_sample']:,.0f} tokens each on average",
        "",
        "Answers",
        *(f"  {question:<24}{answer}" for question, answer in answers),
        "",
        "Largest bottlenecks (time in the operation itself)",
        *_bottlenecks(steps.get("trace")),
    ]
    if "batch_sizes" in steps:
        lines += ["", *_table(steps["batch_sizes"])]
    return lines


def best_row(step: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of most samples/s; None where none could be measured."""
    rows = [row for row in step["rows"] if not row["error"]]
    return max(rows, key=lambda row: row["samples_per_s"]) if rows else None


def _batch_answers(step: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    questions = ("Latency per sample", "Highest throughput", "Best batch size", "Memory that it needs")
    if step is None:
        return [(question, _NOT_MEASURED.format("batch_sizes")) for question in questions]
    best = best_row(step)
    if best is None:
        return [(question, "out of memory at every size") for question in questions]
    unit = step["unit"]
    quickest = min((row for row in step["rows"] if not row["error"]), key=lambda row: row[unit])
    alone = quickest["latency_per_sample_ms"]
    answers = [
        f"{alone['mean']:,.2f} ms, p95 {alone['p95']:,.2f} ms ({_size(unit, quickest)}); "
        f"{best['latency_per_sample_ms']['mean']:,.2f} ms at the best batch",
        f"{best['samples_per_s']:,.1f} samples/s ({best['tokens_per_s']:,.0f} tokens/s)",
        _size(unit, best),
        _memory(best),
    ]
    failed = [row for row in step["rows"] if row["error"]]
    found = list(zip(questions, answers, strict=True))
    if failed:
        found.append(("Out of memory", ", ".join(_size(unit, row) for row in failed)))
    return found


def _whole_answers(step: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if step is None:
        reason = _NOT_MEASURED.format("whole_file")
        return [("Accuracy", reason), ("Time of the whole file", reason)]
    figures = dict(step["figures"])
    time = (
        f"{step['seconds']:,.2f} s for {counted(step['samples'], 'sample{s}')} ({step['samples_per_s']:,.1f}/s, "
        f"batches of {step['batch_tokens']:,} tokens)"
    )
    if not figures:
        return [("Accuracy", "not known: labels were not read"), ("Time of the whole file", time)]
    accuracy = figures.pop("accuracy", None)
    found = [] if accuracy is None else [("Accuracy", f"{accuracy:.4f}")]
    others = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
    return [*found, ("Other metrics" if found else "Metrics", others), ("Time of the whole file", time)]


def _bottlenecks(step: Mapping[str, Any] | None) -> list[str]:
    if step is None:
        return [f"  {_NOT_MEASURED.format('trace')}"]
    return [
        f"  {place}. {found['name']}: {100 * found['share']:.1f} % of the time on the {found['device']}, "
        f"{found['self_ms']:,.2f} ms in {found['calls']:,} calls"
        for place, found in enumerate(step["bottlenecks"], 1)
    ]


def _table(step: Mapping[str, Any]) -> list[str]:
    unit = step["unit"]
    head = (unit.replace("_", " "), "ms/sample", "p95", "ms/batch", "p95", "p99", "samples/s", "CPU MB", "GPU MB")
    return _columns([head, *(_cells(unit, row) for row in step["rows"])])


def _cells(unit: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return (f"{row[unit]:,}", row["error"], *([""] * 7))
    sample, batch = row["latency_per_sample_ms"], row["latency_per_batch_ms"]
    times = (sample["mean"], sample["p95"], batch["mean"], batch["p95"], batch["p99"])
    gpu = row["gpu_memory_peak_mb"]
    return (
        f"{row[unit]:,}",
        *(f"{value:,.2f}" for value in times),
        f"{row['samples_per_s']:,.1f}",
        f"{row['cpu_memory_peak_mb']:,.0f}",
        "-" if gpu is None else f"{gpu:,.0f}",
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _size(unit: str, row: Mapping[str, Any]) -> str:
    return f"batch size {row[unit]:,}" if unit == "batch_size" else f"{row[unit]:,} tokens a batch"


def _memory(row: Mapping[str, Any]) -> str:
    cpu = f"{row['cpu_memory_peak_mb']:,.0f} MB of CPU memory (peak of the process)"
    if row["gpu_memory_peak_mb"] is None:
        return cpu
    return f"{row['gpu_memory_peak_mb']:,.0f} MB of GPU memory (peak), {cpu}"


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
    values = np.array([[_value(metric, row) for row in rows] for metric in METRICS], dtype=np.float64)
    known = [line for line, row in enumerate(values) if np.isfinite(row).any()] or range(len(METRICS))
    metrics, values = [METRICS[line] for line in known], values[list(known)]
    canvas = new_figure(max(7.0, 3.6 + 1.15 * len(rows)), 1.6 + 0.46 * max(1, len(metrics)), title)
    axes = canvas.subplots()
    goodness = _goodness(values, metrics)
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
    axes.set_yticks(range(len(metrics)), [metric.name for metric in metrics])
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


def _value(metric: Metric, row: Row) -> float:
    value: Any = None if row["error"] else row
    for key in metric.keys if value else ():
        value = value[key]
    return float("nan") if value is None else value


def _goodness(values: np.ndarray, metrics: Sequence[Metric]) -> np.ndarray:
    """1 for the best of each line, 0 for the worst, 0.5 where all are about alike; NaN where there is none."""
    finite = np.isfinite(values)
    low = np.where(finite, values, np.inf).min(axis=1, keepdims=True)
    high = np.where(finite, values, -np.inf).max(axis=1, keepdims=True)
    differs = finite & (high - low > _ALIKE * high)
    share = np.divide(values - low, high - low, out=np.full_like(values, 0.5), where=differs)
    more_is_better = np.array([[metric.more_is_better] for metric in metrics])
    return np.where(finite, np.where(more_is_better, share, 1 - share), np.nan)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _missing(row: Row) -> str:
    return "out of\nmemory" if row["error"] else ""
