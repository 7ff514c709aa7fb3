"""What a profile says, in words: the questions that people have, with their answers, and then a table.

In: the profile as plain values, as baseline_metrics.json has it. Out: lines of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.text import counted

Profile = Mapping[str, Any]
_NOT_MEASURED = "not measured (step {}; run it with --steps {})"


def summary_lines(profile: Profile) -> list[str]:
    """The whole report."""
    model, steps = profile["model"], profile["steps"]
    lines = [
        f"Profile of {profile['subject']['model']}",
        f"{model['architecture']}, {model['parameters']:,} parameters, {model['model_size_mb']:,.1f} MB, "
        f"{model['kind']} with {model['outputs']} outputs",
        f"on {model['device']} in {model['amp_dtype']}, {model['threads']} threads, torch {model['torch']}",
        f"data: {profile['subject']['data']}, {counted(profile['data']['samples'], 'sample{s}')}, "
        f"{profile['data']['tokens_per_sample']:,.0f} tokens each on average",
        "",
        "Answers",
        *(f"  {question:<24}{answer}" for question, answer in _answers(steps)),
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


def _answers(steps: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [*_batch_answers(steps.get("batch_sizes")), *_whole_answers(steps.get("whole_file"))]


def _batch_answers(step: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    questions = ("Latency per sample", "Highest throughput", "Best batch size", "Memory that it needs")
    if step is None:
        return [(question, _NOT_MEASURED.format("batch_sizes", "batch_sizes")) for question in questions]
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
        reason = _NOT_MEASURED.format("whole_file", "whole_file")
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
    return [*found, ("Other figures" if found else "Figures", others), ("Time of the whole file", time)]


def _bottlenecks(step: Mapping[str, Any] | None) -> list[str]:
    if step is None:
        return [f"  {_NOT_MEASURED.format('trace', 'trace')}"]
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
