"""Training curves as one PNG: losses, validation metrics, learning rate and speed.

Dotted lines mark resumes, crosses mark steps skipped for a NaN or an infinity. For several runs: losses over time and
over tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from esmeray.common.figure_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MAGENTA,
    ORANGE,
    RED,
    heading,
    legend,
    picture,
    style,
    style_steps,
)
from esmeray.run_folder.metrics_log import MetricLabels, Record

LOWEST_METRIC = -1.0
"""Lower end of the metrics' axis; lower values are shown as markers there."""

Kinds = dict[str, list[Record]]


def draw_curves(records: Iterable[Record], path: Path, title: str, labels: MetricLabels) -> None:
    """Draw the records of metrics.jsonl to a PNG; if a step occurs twice (resumed), the last counts.

    ``labels`` select the validation metrics to draw, in order of their colours.
    """
    kinds = _by_kind(records)
    with picture(path, 11, 6.4, title) as figure:
        losses, metrics, rates, speeds = figure.subplots(2, 2, sharex=True).ravel()
        _draw_losses(losses, kinds, labels)
        _draw_metrics(metrics, kinds["validation"], labels)
        heading(rates, "Learning rate")
        rates.plot(*_series(kinds["train"], "learning_rate"), color=GREY, linewidth=1.8)
        rates.set_ylim(bottom=0)
        rates.yaxis.set_major_formatter("{x:g}")
        _draw_speed(speeds, kinds["train"])
        resumed = sorted({event["step"] for event in kinds["event"] if event["event"] == "resumed"})
        for axes in (losses, metrics, rates, speeds):
            style_steps(axes)
            for step in resumed:
                axes.axvline(step, color=INK, linestyle=":", linewidth=1.0, alpha=0.7, zorder=0)
        for axes in (rates, speeds):
            axes.set_xlabel("step", color=INK)


def draw_comparison(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw the losses of several runs (records of metrics.jsonl by name) over time and over tokens to a PNG."""
    with picture(path, 11, 4.6, "Loss") as figure:
        over_time, over_tokens = figure.subplots(1, 2, sharey=True)
        losses = []
        for (name, records), color in zip(runs.items(), cycle((BLUE, ORANGE, GREEN, RED, MAGENTA, GREY))):
            points = list(_points_of(records))
            # Only one of the two has a label, so that the legend lists each run once.
            for kind, label, width in (("train", None, 0.8), ("validation", name, 2.0)):
                drawn = [(*position, record["loss"]) for *position, record in points if record["kind"] == kind]
                minutes, tokens, values = np.array(drawn, dtype=np.float64).reshape(-1, 3).T
                look = {"color": color, "label": label, "linewidth": width, "alpha": 0.35 if label is None else 1.0}
                over_time.plot(minutes, values, **look)
                over_tokens.plot(tokens, values, **look)
                losses.append(values)
        over_time.set_ylim(*_limits(*losses))
        for axes, unit in ((over_time, "minutes of training"), (over_tokens, "tokens")):
            style(axes)
            axes.set_xlabel(unit, color=INK)
        over_tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
        legend(over_time)


def _points_of(records: Sequence[Record]) -> Iterator[tuple[float, int, Record]]:
    """Yield minutes of training, tokens, and the record, for each record with a loss."""
    seconds, tokens, before = 0.0, 0, None
    for record in records:
        if record.get("event") == "resumed":
            before = None  # the time before is a pause
        if "loss" not in record:
            continue
        # Wall-clock time, so that validations and checkpoints count; the first step has only its own duration.
        seconds += record.get("step_s", 0.0) if before is None else max(0.0, record["time"] - before)
        before = record["time"]
        tokens = record.get("tokens_seen", tokens)  # a validation has the tokens of the step before
        yield seconds / 60, tokens, record


def _draw_losses(axes: Axes, kinds: Kinds, labels: MetricLabels) -> None:
    heading(axes, "Loss")
    steps, losses = _series(kinds["train"], "loss")
    validated, validation_losses = _series(kinds["validation"], "loss")
    others = {label.curve: _series(kinds["validation"], name) for name, label in labels.items() if label.is_loss}
    if len(steps):
        window = max(1, round(len(steps) / 50))
        if window > 1:  # otherwise both curves are the same
            axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        smooth = pd.Series(losses).rolling(window, min_periods=1).mean()
        axes.plot(steps, smooth, color=BLUE, linewidth=1.8, label="training")
        axes.set_ylim(*_limits(losses, validation_losses, *(values for _, values in others.values())))
    if len(validated):
        axes.plot(validated, validation_losses, color=ORANGE, label="validation", **_points(validated))
    for curve, (steps_of_curve, values) in others.items():
        if len(steps_of_curve):
            axes.plot(steps_of_curve, values, "--", color=ORANGE, label=curve)
    skipped = {record["step"] for record in kinds["train"] if record.get("nonfinite")}
    skipped |= {event["step"] for event in kinds["event"] if event["event"] == "nonfinite"}
    if skipped:
        # At the top edge, since their losses are not numbers.
        top, count = axes.get_ylim()[1], f"skipped ({len(skipped)})"
        axes.plot(sorted(skipped), [top] * len(skipped), "x", color=RED, markersize=6, clip_on=False, label=count)
    legend(axes)


def _draw_metrics(axes: Axes, validations: Sequence[Record], labels: MetricLabels) -> None:
    heading(axes, "Validation")
    known = {name for record in validations for name in record}
    shown = [
        name for name, label in labels.items() if name in known and label.repeats not in known and not label.is_loss
    ]
    lowest = 0.0
    for name, color in zip(shown, cycle((GREEN, ORANGE, BLUE))):
        steps, values = _series(validations, name)
        axes.plot(steps, values, color=color, label=f"{labels[name].curve} (last {values[-1]:.3f})", **_points(steps))
        lowest = min(lowest, float(np.nanmin(values, initial=0.0)))
        # An untrained model's R² may be far below: an axis that includes it would flatten the rest of the curve.
        if (below := values < LOWEST_METRIC).any():
            label = f"below {LOWEST_METRIC:g}, down to {np.nanmin(values):,.3g}"
            axes.plot(
                steps[below],
                np.full(below.sum(), LOWEST_METRIC),
                "v",
                color=color,
                markersize=8,
                clip_on=False,
                label=label,
            )
    axes.set_ylim(max(lowest * 1.05, LOWEST_METRIC), 1.0)
    legend(axes)


def _draw_speed(axes: Axes, records: Sequence[Record]) -> None:
    steps, values = _series(records, "tokens_per_s")
    heading(axes, "Tokens per second")
    if len(steps):
        axes.plot(steps, values, color=GREEN, alpha=0.3, linewidth=0.8)
        median = float(np.nanmedian(values))
        axes.axhline(median, color=GREEN, linewidth=1.8, label=f"median {EngFormatter(places=1, sep='')(median)}")
        # A percentile: with the maximum, one stray step would flatten all others.
        axes.set_ylim(0, 1.15 * float(np.nanpercentile(values, 99.5)))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    legend(axes)


def _by_kind(records: Iterable[Record]) -> Kinds:
    """Return steps and validations sorted by step, the last record of each, and all events."""
    latest: dict[str, dict[int, Record]] = {"train": {}, "validation": {}}
    events: list[Record] = []
    for record in records:
        if record["kind"] == "event":
            events.append(record)
        elif record["kind"] in latest:
            latest[record["kind"]][record["step"]] = record
    return {"event": events} | {kind: [by_step[step] for step in sorted(by_step)] for kind, by_step in latest.items()}


def _series(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (P,) int and values (P,) float of the records that have ``name``; null becomes NaN."""
    present = [(record["step"], record[name]) for record in records if name in record]
    return np.array([step for step, _ in present], dtype=np.int64), np.array([v for _, v in present], dtype=np.float64)


def _limits(*curves: np.ndarray) -> tuple[float, float]:
    """Return axis limits that are robust to a few spikes: the first steps count, later outliers don't.

    Computed per curve: a validation curve has a hundredth of the points, and its rise would count as outliers.
    """
    finite = [curve[np.isfinite(curve)] for curve in curves if np.isfinite(curve).any()]
    if not finite:
        return 0.0, 1.0
    low = min(float(curve.min()) for curve in finite)
    # The first value always counts: the start of the training is part of its curve.
    high = max(float(max(np.percentile(curve, 99), curve[0])) for curve in finite)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def _points(steps: np.ndarray) -> dict:
    """Return the style: markers for few points, otherwise only a line."""
    return {"linewidth": 1.8, "marker": "o" if len(steps) <= 40 else "", "markersize": 4}
