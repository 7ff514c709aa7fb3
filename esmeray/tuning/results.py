"""The results of a search: its fastest trials, best.yaml, and all trials as a table and as a picture."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import write_atomically
from esmeray.dataset.section import DataSection
from esmeray.dataset.store.conversion import SAMPLE
from esmeray.monitoring.advice import Facts, limiting_factor
from esmeray.train_config.loading import dump_config
from esmeray.train_config.section import absolute_path
from esmeray.tuning.records import (
    KEYS,
    NAMES,
    STATUSES,
    Job,
    Measurement,
    Trial,
    value_text,
)
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace

SHOWN = 5
"""Number of trials in the terminal's table."""


@dataclass(frozen=True)
class Results:
    """All trials of a search, in order; a share ``margin`` of the memory must stay free."""

    trials: Sequence[Trial]
    space: SearchSpace
    margin: float

    @property
    def ranked(self) -> list[Trial]:
        """Trials that fit, fastest first."""
        return sorted(filter(self.speed, self.trials), key=self.speed, reverse=True)

    @property
    def best(self) -> Trial | None:
        return next(iter(self.ranked), None)

    def speed(self, trial: Trial) -> float:
        return trial.measurement.speed(self.margin)

    @property
    def own(self) -> Trial | None:
        """The trial of the experiment's own settings, if they ran."""
        own = [
            trial for trial in self.trials if trial.settings == self.space.default and trial.measurement.tokens_per_s
        ]
        return next(iter(own), None)

    def outcomes(self) -> str:
        counts = Counter(STATUSES[trial.measurement.status] for trial in self.trials)
        return ", ".join(f"{count} {word}" for word, count in counts.most_common()) or "none measured"


def write_best(best: Trial, results: Results, job: Job) -> None:
    """Write the experiment with the fastest settings, and a comment on how they were found.

    It runs from any folder and has its own name, since the experiment's checkpoints have other batches.
    """
    fastest = job.trial_config(best.settings)
    run = job.config.run.model_copy(update={"name": f"{job.config.run.name}-fastest", "resume": "allow"})
    runnable = fastest.model_copy(update={"run": run, "data": _from_any_folder(fastest.data)})
    lines = [
        f"{_speed_text(best.measurement)}: the fastest of {len(results.trials)} tried configurations (of "
        f"{len(results.space)}),",
        f"found by esmeray tune ({datetime.now(UTC):%Y-%m-%d}): trial {best.number} of {job.folder.path}.",
        "The global batch is unchanged."
        if job.search.keep_global_tokens
        else "A step is one batch per worker, so the global batch has changed and training may give a different "
        "result.",
        f"  python train_ray.py --config {job.folder.best}",
    ]
    write_atomically(job.folder.best, "".join(f"# {line}\n" for line in lines) + "\n" + dump_config(runnable))


def trial_table(results: Results) -> pd.DataFrame:
    """Return all trials with their settings and measurements."""
    measurements = pd.json_normalize([asdict(trial.measurement) for trial in results.trials], sep="_")
    settings = pd.DataFrame([asdict(trial.settings) for trial in results.trials])
    numbers = pd.Series([trial.number for trial in results.trials], name="trial")
    return pd.concat([numbers, settings, measurements], axis=1)


def draw(trials: pd.DataFrame, path: Path) -> None:
    """Draw speed and peak memory by token budget as PNG. Failures are marked at zero."""
    from esmeray.common.figure_style import legend, picture, style  # here: it loads matplotlib

    kinds = trials["precision"].where(trials["status"] == "ok", trials["status"].map(STATUSES))
    panels = {"Tokens per second": trials["tokens_per_s"], "Peak memory in GiB": trials["peak_memory_bytes"] / 2**30}
    with picture(path, 13, 5, path.parent.name) as figure:
        for axes, (title, heights) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            style(axes, title)
            axes.set_xscale("log", base=2)
            for kind, rows in trials.groupby(kinds):
                axes.scatter(rows["tokens"], heights.fillna(0.0)[rows.index], label=kind)
            budgets = sorted(trials["tokens"].unique())
            axes.set_xticks(budgets, [f"{tokens:,}" for tokens in budgets])
            axes.margins(0.08)
            axes.set(xlabel="token budget", ylim=(0.0, None))
            legend(axes, over_curves=True)


def make_table(results: Results) -> Table:
    """Return the fastest configurations as a table; for a search over budgets alone, every budget."""
    is_over_budgets = results.space.varied == ["tokens"]
    trials = sorted(results.trials, key=lambda trial: trial.settings.tokens) if is_over_budgets else results.ranked
    table = Table("trial", *(NAMES[name] for name in results.space.varied), "result")
    for trial in trials if is_over_budgets else trials[:SHOWN]:
        values = [value_text(getattr(trial.settings, name)) for name in results.space.varied]
        style = "bold" if trial is results.best else ""
        table.add_row(str(trial.number), *values, result_text(trial.measurement, results.margin), style=style)
    return table


def summary(best: Trial, results: Results) -> Iterator[str]:
    """Yield lines on the fastest configuration, and on what limits it."""
    seconds = sum(trial.measurement.seconds for trial in results.trials)
    tried = f"{len(results.trials)} of {len(results.space)} configurations tried in {seconds / 60:.1f} min"
    yield f"{tried}: {results.outcomes()}."
    if results.own is not None and results.own is not best:
        ratio = (best.measurement.tokens_per_s or 0.0) / (results.own.measurement.tokens_per_s or 1.0)
        yield f"{ratio:.2f} times the speed of the experiment's own settings."
    shares: dict[str, Any] = dict(best.measurement.shares)
    if best.settings.workers == 1:  # with one worker, communication is only its agreement with itself
        shares.pop("communication", None)
    searched = frozenset(KEYS[name] for name in results.space.varied)
    limit = limiting_factor(Facts(shares, tried=searched))
    if limit is not None:
        yield f"{limit}."


def to_set(best: Trial, results: Results, global_tokens: int, search: TuneConfig) -> list[str]:
    """Return the largest token budget that fits, and for a search over budgets alone the options to set."""
    # Reported even if it is slow: it shows the capacity of the memory.
    largest = max(filter(results.speed, results.trials), key=lambda trial: trial.settings.tokens)
    lines = [f"Largest token budget that fits: {largest.settings.tokens:,} tokens, {_memory(largest.measurement)}."]
    # For other searches best.yaml contains all settings.
    if results.space.varied != ["tokens"] or search.keep_global_tokens:
        return lines
    at_once = best.settings.tokens * best.settings.workers
    # A global batch holds whole micro-batches of all workers: round to the nearest multiple.
    steps = max(1, round(global_tokens / at_once))
    return [*lines, f"To set: --batch.tokens {best.settings.tokens} --batch.global_tokens {steps * at_once}"]


def nothing_fits(results: Results) -> ResourceError:
    """Return the error if no configuration ran and left the margin free."""
    tried = [trial.measurement for trial in results.trials]
    # The first failure belongs to the experiment's own settings, or to the nearest valid ones.
    reason = next((f"; the first failure: {m.reason}" for m in tried if m.status != "ok"), "")
    return ResourceError(
        f"none of {len(tried)} configurations fits and leaves {results.margin:.0%} of the memory free "
        f"({results.outcomes()}{reason}): add smaller budgets to --tune.space.tokens with a lower "
        "data.max_length, gradient checkpointing or a higher ZeRO stage, or use a smaller backbone"
    )


def result_text(measurement: Measurement, margin: float) -> str:
    """Return the speed and memory of a trial, or why it has none."""
    status = STATUSES[measurement.status]
    if measurement.tokens_per_s is None:
        return f"{status} ({measurement.reason.removeprefix(f'{status}: ')})"
    remark = "" if measurement.fits(margin) else f", which leaves less than {margin:.0%} free"
    return f"{_speed_text(measurement)}{remark}"


def _from_any_folder(section: DataSection) -> DataSection:
    """Return the data section with absolute paths."""
    sources = section.source if section.source == [SAMPLE] else [*map(absolute_path, section.source)]
    store = None if section.store is None else absolute_path(section.store)
    held_out = [*map(absolute_path, section.labels.validation_source)]
    labels = section.labels.model_copy(update={"validation_source": held_out})
    return section.model_copy(update={"source": sources, "store": store, "labels": labels})


def _speed_text(measurement: Measurement) -> str:
    return f"{measurement.tokens_per_s or 0.0:,.0f} tokens/s, {_memory(measurement)}"


def _memory(measurement: Measurement) -> str:
    peak_bytes, total_bytes = measurement.peak_memory_bytes or 0, measurement.total_memory_bytes or 0
    return f"peak {peak_bytes / 2**30:.2f} of {total_bytes / 2**30:.2f} GiB"
