"""The plot of a search: speed and memory by token budget, and the importance of each setting (Optuna's fANOVA)."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import optuna
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

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
)
from esmeray.tuning.records import NAMES, STATUSES, Trial, value_text
from esmeray.tuning.results import Results

_COLOURS = {"bf16": BLUE, "fp32": ORANGE, "fp16": GREEN}
_FAILURES = {"out_of_memory": "^", "crash": "X", "timeout": "s", "nan": "P", "refused": "|"}
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
_FEWEST_TRIALS = 4
"""Minimum number of trials to estimate importances from."""


def draw_search(results: Results, path: Path, title: str) -> None:
    """Draw speed, memory and importances as one PNG. An existing file is replaced once the new one is complete."""
    with picture(path, 13, 7.6, textwrap.fill(title, 105)) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=[1.5, 1.0])
        _draw_speed(figure.add_subplot(grid[0, 0]), results)
        _draw_memory(figure.add_subplot(grid[0, 1]), results)
        _draw_importance(figure.add_subplot(grid[1, :]), results)


def importances(results: Results) -> dict[str, float]:
    """Return each setting's share in the differences of speed, largest first; empty if unknown."""
    measured = results.measured
    words = [{NAMES[name]: value_text(name, getattr(t.settings, name)) for name in NAMES} for t in measured]
    values = {name: sorted({words_of_trial[name] for words_of_trial in words}) for name in NAMES.values()}
    varied = {name: choices for name, choices in values.items() if len(choices) > 1}
    speeds = [trial.measurement.tokens_per_s for trial in measured]
    if len(measured) < _FEWEST_TRIALS or len(set(speeds)) < 2 or not varied:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(choices) for name, choices in varied.items()
    }
    for words_of_trial, speed in zip(words, speeds, strict=True):
        params = {name: words_of_trial[name] for name in varied}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=speed))
    # fANOVA's forest is random: a fixed seed makes the page of a search reproducible.
    return optuna.importance.get_param_importances(study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0))


def _draw_speed(axes: Axes, results: Results) -> None:
    heading(axes, "Tokens per second by token budget")
    _draw_curves(axes, results, lambda trial: trial.measurement.tokens_per_s or 0.0)
    for status, marker in _FAILURES.items():
        failed = [trial.settings.tokens for trial in results.trials if trial.measurement.status == status]
        if failed:
            label = f"{STATUSES[status]} ({len(failed)})"  # type: ignore[index]
            # Failures have no speed and are drawn at zero, below the end of the curve that they explain.
            axes.plot(failed, [0.0] * len(failed), marker, color=RED, label=label, clip_on=False)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    legend(axes, over_curves=True)


def _draw_memory(axes: Axes, results: Results) -> None:
    heading(axes, "Peak memory in GiB by token budget")
    _draw_curves(axes, results, lambda trial: (trial.measurement.peak_memory_bytes or 0) / 2**30)
    totals = filter(None, (trial.measurement.total_memory_bytes for trial in results.measured))
    allowed = (1 - results.margin) * min(totals, default=0) / 2**30
    highest = max(((trial.measurement.peak_memory_bytes or 0) / 2**30 for trial in results.measured), default=0.0)
    if 0 < allowed < 3 * highest:  # unknown without a GPU; a limit far above would flatten the curves
        axes.axhline(allowed, color=RED, linestyle="--", label=f"memory minus the margin of {results.margin:.0%}")
        axes.set_ylim(0.0, 1.15 * max(allowed, highest))
    legend(axes, over_curves=True)


def _draw_curves(axes: Axes, results: Results, height: Callable[[Trial], float]) -> None:
    """Plot points by precision (colour) and checkpointing (marker), and a line through the highest of each budget."""
    style(axes)
    kinds: dict[tuple[str, bool], list[Trial]] = {}
    for trial in results.measured:
        kinds.setdefault((trial.settings.precision, bool(trial.settings.gradient_checkpointing)), []).append(trial)
    for (precision, recomputes), trials in sorted(kinds.items()):
        highest: dict[int, float] = {}
        for trial in trials:
            highest[trial.settings.tokens] = max(height(trial), highest.get(trial.settings.tokens, 0.0))
        colour = _COLOURS.get(precision, GREY)
        marker = "D" if recomputes else "o"
        axes.plot([t.settings.tokens for t in trials], list(map(height, trials)), marker, color=colour, alpha=0.6)
        label = value_text("precision", precision) + (", checkpointing" if recomputes else "")
        line = "--" if recomputes else "-"
        axes.plot(*zip(*sorted(highest.items()), strict=True), line, color=colour, marker=marker, label=label)
    best = results.best
    if best is not None:
        axes.plot(best.settings.tokens, height(best), "*", color=MAGENTA, markersize=15, zorder=5, label="best")
    # Ticks at the budgets: a log axis would label powers of ten, which were not tried.
    budgets = [float(tokens) for tokens in results.space.budgets]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(budgets) / 1.35, max(budgets) * 1.35)
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_THOUSANDS)


def _draw_importance(axes: Axes, results: Results) -> None:
    style(axes, "Share of the speed variance per setting (fANOVA)")
    axes.grid(visible=False)
    shares = dict(reversed(importances(results).items()))
    if not shares:
        axes.text(0.5, 0.5, "too few trials", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    bars = axes.barh(list(shares), list(shares.values()), color=BLUE)
    axes.bar_label(bars, [f" {share:.0%}" for share in shares.values()], color=INK, fontsize=9)
    axes.set_xlim(0.0, 1.1 * max(shares.values()))  # space for the bars' labels
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
