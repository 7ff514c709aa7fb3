"""The steps of a profile, and the profile between calls: plain values, as baseline_metrics.json has them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from inference.classifier import ClassifierPipeline
from inference.classifier_profile import (
    TRACED_RUNS,
    BatchResult,
    Unit,
    describe,
    measure_batches,
    measure_whole,
    trace,
)
from inference.labelled import LabelledTexts, kept_rows
from model.metrics.classification import classification_metrics
from tools._profile_classifier.report import best_row, draw_comparison, draw_heatmap

STEPS = ("batch_sizes", "whole_file", "trace", "plots")
METRICS_FILE, DETAILS_FILE = "baseline_metrics.json", "detailed_metrics.csv"
PLOTS_FOLDER, TRACES_FOLDER = "plots", "profiler_traces"
_FORMAT_VERSION = 1
_TRACED_BATCH = 8
_DETAILS = ("sequences", "tokens", "longest", "prepare_ms", "compute_ms", "latency_ms", "latency_per_sample_ms")

Profile = dict[str, Any]


def known_profile(output: Path, subject: Profile, steps: Iterable[str]) -> Profile:
    """Read the folder's profile, to be added to; an empty one where all steps are to be done anyway.

    Args:
        output: the folder.
        subject: values in which results have to agree to stand beside each other.
        steps: steps to be done.

    Raises:
        ConfigError: some steps are asked for, and the others' results are of another model, file or device; or there
            are no batch sizes to draw.
    """
    profile: Profile = {"format_version": _FORMAT_VERSION, "subject": subject, "steps": {}}
    path = output / METRICS_FILE
    if set(steps) != set(STEPS) and path.is_file():
        try:
            profile = json.loads(path.read_text(encoding="utf-8"))
            same = profile["format_version"] == _FORMAT_VERSION and profile["subject"] == subject
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: is damaged ({type(error).__name__}); remove it or choose another --output"
            ) from error
        if not same:
            raise ConfigError(
                f"{path}: is of another model, file, device or precision; choose another --output, or do all steps"
            )
    if "plots" in steps and "batch_sizes" not in {*steps, *profile["steps"]}:
        raise ConfigError("--steps plots: there are no batch sizes to draw; run it with --steps batch_sizes plots")
    return profile


class Profiler:
    """Does steps and adds their results to a profile.

    Args:
        pipeline: what is profiled.
        texts: to draw batches from, with targets where labels were read.
        output: folder of the files that steps write.
        profile: what is known, to be added to.
        show: receives what is being done.
    """

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
        for folder in (PLOTS_FOLDER, TRACES_FOLDER):
            (output / folder).mkdir(exist_ok=True)

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
        (self._output / DETAILS_FILE).write_text(_details(unit, results), encoding="utf-8")
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
            rows = kept_rows(predictions)
            kind = self._pipeline.label_space.kind
            metrics = classification_metrics(
                kind, predictions.probabilities, targets if rows is None else targets[rows]
            )
        self._profile["steps"]["whole_file"] = {**facts, "figures": metrics}

    def trace(self) -> None:
        """Profile batches of the fastest size."""
        measured = self._profile["steps"].get("batch_sizes")
        best = best_row(measured) if measured else None
        size = round(best["sequences_per_batch"]) if best else _TRACED_BATCH
        bottlenecks = trace(self._pipeline, self._texts.texts, self._output / TRACES_FOLDER, size)
        self._profile["steps"]["trace"] = {"batch_size": size, "runs": TRACED_RUNS, "bottlenecks": bottlenecks}

    def plots(self) -> None:
        """Draw the batch sizes."""
        measured, model = self._profile["steps"]["batch_sizes"], self._profile["model"]
        title = f"{self._profile['subject']['model']} on {model['device']}, {model['amp_dtype']}"
        folder = self._output / PLOTS_FOLDER
        draw_comparison(folder / "batch_size_comparison.png", measured["rows"], measured["unit"], title)
        draw_heatmap(folder / "metrics_heatmap.png", measured["rows"], measured["unit"], title)


def _details(unit: str, results: Iterable[BatchResult]) -> str:
    """A row for each batch, as CSV."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([unit, "run", *_DETAILS, "error"])
    for result in results:
        if result.error is not None:
            rows.writerow([result.value, "", *([""] * len(_DETAILS)), result.error])
        for number, run in enumerate(result.runs, 1):
            times = (run.prepare_s, run.compute_s, run.latency_s, run.latency_s / run.sequences)
            milliseconds = [f"{1e3 * seconds:.6g}" for seconds in times]
            rows.writerow([result.value, number, run.sequences, run.tokens, run.longest, *milliseconds, ""])
    return text.getvalue()
