"""The steps of a profile, and the profile between calls: plain values, as baseline_metrics.json has them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from inference.classifier import ClassifierPipeline
from inference.classifier_profile import (
    TRACED_RUNS,
    BatchResult,
    Run,
    describe,
    measure_batches,
    measure_whole,
    trace,
)
from inference.classify.labelled import LabelledTexts
from model.metrics.classification import classification_metrics
from tools.profile._classifier.report import best_row, draw_comparison, draw_heatmap

STEPS = ("batch_sizes", "whole_file", "trace", "plots")
METRICS_FILE, DETAILS_FILE = "baseline_metrics.json", "detailed_metrics.csv"
_FORMAT_VERSION = 1
_TRACED_BATCH = 8

Profile = dict[str, Any]


def known_profile(output: Path, subject: Profile, steps: Iterable[str]) -> Profile:
    """Read the folder's profile, to be added to; an empty one where all steps are to be done anyway.

    Raises ConfigError where the results there are damaged or of another subject (model, file, device or precision), or
    where there are no batch sizes to draw.
    """
    profile: Profile = {"format_version": _FORMAT_VERSION, "subject": subject, "steps": {}}
    path = output / METRICS_FILE
    if set(steps) != set(STEPS) and path.is_file():
        try:
            profile = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: is damaged; remove it or choose another --output") from error
        if (profile.get("format_version"), profile.get("subject")) != (_FORMAT_VERSION, subject):
            raise ConfigError(
                f"{path}: is of another model, file, device or precision; choose another --output, or do all steps"
            )
    if "plots" in steps and "batch_sizes" not in {*steps, *profile["steps"]}:
        raise ConfigError("--steps plots: there are no batch sizes to draw; run it with --steps batch_sizes plots")
    return profile


def do_steps(
    wanted: Sequence[str],
    batches: dict[str, Any],
    pipeline: ClassifierPipeline,
    texts: LabelledTexts,
    output: Path,
    profile: Profile,
    show: Callable[[str], None],
) -> None:
    """Do the wanted steps and add their results to the profile; their files go to ``output``.

    ``batches`` are the unit, values, warmup_runs and runs of :func:`measure_batches`.
    """
    tokens_per_sample = float(pipeline.token_lengths(texts.texts).mean())
    profile["model"] = describe(pipeline)
    profile["data"] = {"samples": len(texts.texts), "tokens_per_sample": tokens_per_sample}
    steps = profile["steps"]
    if "batch_sizes" in wanted:
        results = list(measure_batches(pipeline, texts.texts, show=show, **batches))
        _write_details(output / DETAILS_FILE, batches["unit"], results)
        rows = [result.summary() for result in results]
        steps["batch_sizes"] = {**batches, "rows": rows}
    if "whole_file" in wanted:
        steps["whole_file"] = _whole_file(pipeline, texts, show)
    if "trace" in wanted:
        show("trace")
        best = best_row(steps.get("batch_sizes", {"rows": []}))
        size = round(best["sequences_per_batch"]) if best else _TRACED_BATCH
        folder = output / "profiler_traces"
        folder.mkdir(exist_ok=True)
        bottlenecks = trace(pipeline, texts.texts, folder, size)
        steps["trace"] = {"batch_size": size, "runs": TRACED_RUNS, "bottlenecks": bottlenecks}
    if "plots" in wanted:
        measured, model = steps["batch_sizes"], profile["model"]
        title = f"{profile['subject']['model']} on {model['device']}, {model['precision']}"
        plots = output / "plots"
        draw_comparison(plots / "batch_size_comparison.png", measured["rows"], measured["unit"], title)
        draw_heatmap(plots / "metrics_heatmap.png", measured["rows"], measured["unit"], title)


def _whole_file(pipeline: ClassifierPipeline, texts: LabelledTexts, show: Callable[[str], None]) -> Profile:
    """Predict the whole file, and compare with its labels where these were read."""
    facts, predictions = measure_whole(
        pipeline, texts.texts, lambda done, total: show(f"whole_file: {done:,} of {total:,}")
    )
    metrics: dict[str, float] = {}
    if texts.targets.size:
        rows = predictions.kept_residues()
        targets = texts.targets if rows is None else texts.targets[rows]
        metrics = classification_metrics(pipeline.label_space.kind, predictions.probabilities, targets)
    return {**facts, "metrics": metrics}


def _write_details(path: Path, unit: str, results: Iterable[BatchResult]) -> None:
    """A row for each batch, as CSV."""
    names = [unit, "run", *(field.name for field in fields(Run)), "error"]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        for result in results:
            if result.error is not None:
                table.writerow({unit: result.value, "error": result.error})
            for number, run in enumerate(result.runs, 1):
                table.writerow({unit: result.value, "run": number, **asdict(run)})
