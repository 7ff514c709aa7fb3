"""A profile for a reader: the questions that people have with their answers, a table, six panels and a heatmap.

In: the profile as plain values, as baseline_metrics.json has it. Out: lines of text, and PNGs. Batch sizes that ran out
of memory are left out of the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from common.figure_style import BLUE, GREY, ORANGE, RED, heading, legend, new_figure, save, style
from common.text import counted

Row = Mapping[str, Any]
_NOT_MEASURED = "not measured (step {0}; run it with --steps {0})"
_PANELS = (
    ("Latency per sample (ms)", "latency_per_sample_ms", ("p50", "p95", "p99", "mean")),
    ("Throughput (samples/s)", "samples_per_s", ()),
    ("GPU memory (MB)", "gpu_memory_peak_mb", ()),
    ("CPU memory (MB, peak resident)", "cpu_memory_peak_mb", ()),
    ("Latency per batch (ms)", "latency_per_batch_ms", ("p50", "p95", "p99", "mean")),
    ("Samples/s per MB of memory", "samples_per_s_per_mb", ()),
)
"""Title, key and lines of each panel; a value without lines is a number."""


_LINES = (
    ("ms per sample, mean", "latency_per_sample_ms", "mean", -1),
    ("ms per sample, p95", "latency_per_sample_ms", "p95", -1),
    ("ms per batch, mean", "latency_per_batch_ms", "mean", -1),
    ("ms per batch, p99", "latency_per_batch_ms", "p99", -1),
    ("samples/s", "samples_per_s", "", 1),
    ("tokens/s", "tokens_per_s", "", 1),
    ("samples/s per MB", "samples_per_s_per_mb", "", 1),
    ("CPU MB, peak", "cpu_memory_peak_mb", "", -1),
    ("GPU MB, peak", "gpu_memory_peak_mb", "", -1),
)
"""Name, key and entry of each line of the heatmap; 1 where more is better, -1 where less is."""


def summary_lines(profile: Mapping[str, Any]) -> list[str]:
    """The whole report."""
    model, steps = profile["model"], profile["steps"]
    answers = [*_batch_answers(steps.get("batch_sizes")), *_whole_answers(steps.get("whole_file"))]
    lines = [
        f"Profile of {profile['subject']['model']}",
        f"{model['architecture']}, {model['parameters']:,} parameters, {model['model_size_mb']:,.1f} MB, "
        f"{model['kind']} with {model['outputs']} outputs",
        f"on {model['device']} in {model['precision']}, {model['threads']} threads, torch {model['torch']}",
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
    return max(rows, key=lambda row: row["samples_per_s"], default=None)


def _batch_answers(step: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if step is None:
        return [("Latency and throughput", _NOT_MEASURED.format("batch_sizes"))]
    best, unit = best_row(step), step["unit"]
    if best is None:
        return [("Latency and throughput", "out of memory at every size")]
    quickest = min((row for row in step["rows"] if not row["error"]), key=lambda row: row[unit])
    alone = quickest["latency_per_sample_ms"]
    found = [
        ("Latency per sample", f"{alone['mean']:,.2f} ms, p95 {alone['p95']:,.2f} ms ({_size(unit, quickest)})"),
        ("Highest throughput", f"{best['samples_per_s']:,.1f} samples/s ({best['tokens_per_s']:,.0f} tokens/s)"),
        ("Best batch size", _size(unit, best)),
        ("Memory that it needs", _memory(best)),
    ]
    failed = [_size(unit, row) for row in step["rows"] if row["error"]]
    return [*found, ("Out of memory", ", ".join(failed))] if failed else found


def _whole_answers(step: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if step is None:
        return [("Accuracy, whole file", _NOT_MEASURED.format("whole_file"))]
    time = (
        f"{step['seconds']:,.2f} s for {counted(step['samples'], 'sample{s}')} ({step['samples_per_s']:,.1f}/s, "
        f"batches of {step['batch_tokens']:,} tokens)"
    )
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in step["metrics"].items())
    name = "Accuracy" if "accuracy" in step["metrics"] or not metrics else "Metrics"
    return [(name, metrics or "not known: labels were not read"), ("Time of the whole file", time)]


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
    rows = [head, *(_cells(unit, row) for row in step["rows"])]
    return ["  ".join(f"{cell:>10}" for cell in row).rstrip() for row in rows]


def _cells(unit: str, row: Row) -> tuple[str, ...]:
    if row["error"]:
        return f"{row[unit]:,}", row["error"]
    sample, batch = row["latency_per_sample_ms"], row["latency_per_batch_ms"]
    times = (sample["mean"], sample["p95"], batch["mean"], batch["p95"], batch["p99"])
    cpu_mb, gpu_mb = row["cpu_memory_peak_mb"], row["gpu_memory_peak_mb"]
    return (
        f"{row[unit]:,}",
        *(f"{value:,.2f}" for value in times),
        f"{row['samples_per_s']:,.1f}",
        f"{cpu_mb:,.0f}",
        "-" if gpu_mb is None else f"{gpu_mb:,.0f}",
    )


def _size(unit: str, row: Row) -> str:
    return f"batch size {row[unit]:,}" if unit == "batch_size" else f"{row[unit]:,} tokens a batch"


def _memory(row: Row) -> str:
    cpu = f"{row['cpu_memory_peak_mb']:,.0f} MB of CPU memory (peak of the process)"
    gpu_mb = row["gpu_memory_peak_mb"]
    return cpu if gpu_mb is None else f"{gpu_mb:,.0f} MB of GPU memory (peak), {cpu}"


def draw_comparison(path: Path, rows: Sequence[Row], unit: str, title: str) -> None:
    """The six panels; that of GPU memory is empty where there is no GPU."""
    figure = new_figure(13, 7.2, title)
    done = [row for row in rows if not row["error"]]
    places = [row[unit] for row in done]
    for axes, (name, key, lines) in zip(figure.subplots(2, 3).ravel(), _PANELS, strict=True):
        heading(axes, name)
        style(axes)
        values = [row[key] for row in done]
        for line, colour in zip(lines or ("",), (BLUE, ORANGE, RED, GREY), strict=False):
            heights = [value[line] if line else value for value in values]
            if None not in heights:
                axes.plot(places, heights, color=colour, marker="o", markersize=4, label=line or None)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.06, y=0.08)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(unit.replace("_", " "))
        legend(axes)
    save(figure, path)


def draw_heatmap(path: Path, rows: Sequence[Row], unit: str, title: str) -> None:
    """Every metric of every batch size as a number, from red (the worst of its line) to green (the best)."""
    done = [row for row in rows if not row["error"]]
    lines = [line for line in _LINES if done and done[0][line[1]] is not None]
    values = np.array([[row[key][entry] if entry else row[key] for row in done] for _, key, entry, _ in lines], float)
    figure = new_figure(max(7.0, 3.6 + 1.15 * len(done)), 1.6 + 0.46 * max(1, len(lines)), title)
    axes = figure.subplots()
    if done:
        signed = values * np.array([[sign] for *_, sign in lines])
        low, high = signed.min(axis=1, keepdims=True), signed.max(axis=1, keepdims=True)
        goodness = np.divide(signed - low, high - low, out=np.full_like(values, 0.5), where=high > low)
        axes.imshow(goodness, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto", alpha=0.6)
    for (line, column), value in np.ndenumerate(values):
        axes.text(column, line, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}", ha="center", va="center")
    axes.set_xticks(range(len(done)), [f"{row[unit]:,}" for row in done])
    axes.set_yticks(range(len(lines)), [name for name, *_ in lines])
    axes.set_xlabel(f"{unit.replace('_', ' ')} (green: the best of its line)")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    save(figure, path)
