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
    Unit,
    describe,
    measure_batches,
    measure_whole,
    trace,
)
from inference.labelled import LabelledTexts
from model.metrics.classification import classification_metrics
from tools._profile_classifier.report import best_row, draw_comparison

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


class Profiler:
    """Does steps and adds their results to a profile; files that steps write go to the folder ``output``."""

    def __init__(
        self,
        pipeline: ClassifierPipeline,
        texts: LabelledTexts,
        output: Path,
        profile: Profile,
        show: Callable[[str], None],
    ) -> None:
        self._pipeline, self._texts, self._output, self._profile, self._show = pipeline, texts, output, profile, show
        profile["model"] = describe(pipeline)
        tokens_per_sample = float(pipeline.token_lengths(texts.texts).mean())
        profile["data"] = {"samples": len(texts.texts), "tokens_per_sample": tokens_per_sample}

    def batch_sizes(self, unit: Unit, values: Sequence[int], warmup_runs: int, runs: int) -> None:
        """Measure batches of each size or token budget."""
        measured = measure_batches(
            self._pipeline,
            self._texts.texts,
            unit=unit,
            values=values,
            warmup_runs=warmup_runs,
            runs=runs,
            show=self._show,
        )
        results = list(measured)
        _write_details(self._output / DETAILS_FILE, unit, results)
        rows = [result.summary() for result in results]
        self._profile["steps"]["batch_sizes"] = {"unit": unit, "warmup_runs": warmup_runs, "runs": runs, "rows": rows}

    def whole_file(self) -> None:
        """Predict the whole file, and compare with its labels where these were read."""
        facts, predictions = measure_whole(
            self._pipeline, self._texts.texts, lambda done, total: self._show(f"whole_file: {done:,} of {total:,}")
        )
        metrics: dict[str, float] = {}
        targets = self._texts.targets
        if targets.size:
            rows = predictions.kept_residues()
            kept = targets if rows is None else targets[rows]
            metrics = classification_metrics(self._pipeline.label_space.kind, predictions.probabilities, kept)
        self._profile["steps"]["whole_file"] = {**facts, "figures": metrics}

    def trace(self) -> None:
        """Profile batches of the fastest size."""
        best = best_row(self._profile["steps"].get("batch_sizes", {"rows": []}))
        size = round(best["sequences_per_batch"]) if best else _TRACED_BATCH
        folder = self._output / "profiler_traces"
        folder.mkdir(exist_ok=True)
        bottlenecks = trace(self._pipeline, self._texts.texts, folder, size)
        self._profile["steps"]["trace"] = {"batch_size": size, "runs": TRACED_RUNS, "bottlenecks": bottlenecks}

    def plots(self) -> None:
        """Draw the batch sizes."""
        measured, model = self._profile["steps"]["batch_sizes"], self._profile["model"]
        title = f"{self._profile['subject']['model']} on {model['device']}, {model['amp_dtype']}"
        path = self._output / "plots" / "batch_size_comparison.png"
        draw_comparison(path, measured["rows"], measured["unit"], title)


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
