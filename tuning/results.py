"""The results of a search: which of its trials are fastest, as far as the noise lets that be said, and best.yaml."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import write_atomically
from esmeray.common.text import counted
from esmeray.dataset.section import DataSection
from esmeray.dataset.store.conversion import SAMPLE
from esmeray.train_config.loading import dump_config
from esmeray.train_config.natures import absolute_path
from esmeray.tuning.records import Job, Trial
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.settings import STATUSES, Measurement, memory_text, settings_text
from esmeray.tuning.space import SearchSpace

NOISY = 1.1
"""Ratio of the fastest window to the slowest from which on a speed is shown with its windows."""


@dataclass(frozen=True)
class Results:
    """All trials of a search, in order; a share ``margin`` of the memory has to stay free.

    Speeds that differ by less than ``agreement`` are the same, as far as two windows of one trial show.
    """

    trials: Sequence[Trial]
    space: SearchSpace
    margin: float
    agreement: float = 0.0

    @property
    def measured(self) -> list[Trial]:
        """Trials with a speed, those that were stopped early included."""
        return [trial for trial in self.trials if trial.measurement.tokens_per_s is not None]

    @property
    def ranked(self) -> list[Trial]:
        """Trials that were measured to the end and fit, the fastest first."""
        complete = [trial for trial in self.trials if trial.measurement.status == "ok" and self._speed(trial)]
        return sorted(complete, key=self._speed, reverse=True)

    @property
    def best(self) -> Trial | None:
        return next(iter(self.ranked), None)

    @property
    def as_fast(self) -> list[Trial]:
        """Trials that are slower than the fastest by no more than windows of one trial differ."""
        fastest, *others = [*self.ranked]
        return [trial for trial in others if self._speed(trial) >= (1 - self.agreement) * self._speed(fastest)]

    @property
    def largest(self) -> Trial | None:
        """The largest token budget that fits, whether or not it is fast."""
        fitting = [trial for trial in self.measured if self._speed(trial)]
        return max(fitting, key=lambda trial: trial.settings.tokens, default=None)

    @property
    def own(self) -> Trial | None:
        """The experiment's own configuration, if it was measured."""
        return next((trial for trial in self.measured if trial.settings == self.space.default), None)

    def outcomes(self) -> str:
        counts = Counter(STATUSES[trial.measurement.status] for trial in self.trials)
        return ", ".join(f"{count} {word}" for word, count in counts.most_common()) or "none was measured"

    def _speed(self, trial: Trial) -> float:
        return trial.measurement.speed(self.margin)


def speed_text(measurement: Measurement) -> str:
    """Tokens per second, with its windows where they differ: ``900 tokens/s (windows 800 to 990)``."""
    slowest, fastest = min(measurement.windows, default=0.0), max(measurement.windows, default=0.0)
    noise = f" (windows {slowest:,.0f} to {fastest:,.0f})" if fastest > NOISY * slowest else ""
    return f"{measurement.tokens_per_s or 0.0:,.0f} tokens/s{noise}"


def write_best(results: Results, job: Job) -> None:
    """Write the experiment with the fastest settings; a comment says how it was found.

    It runs from any folder, under a name of its own, as its batches are not those of the experiment's checkpoints.
    """
    assert results.best is not None
    fastest = results.best.settings.applied(job.config, job.search.keep_global_tokens)
    run = fastest.run.model_copy(update={"name": f"{fastest.run.name}-fastest", "resume": "allow"})
    runnable = fastest.model_copy(update={"run": run, "data": _from_any_folder(fastest.data)})
    write_atomically(job.folder.best, _comment(job.folder.best, results, job.search) + dump_config(runnable))


def noise_lines(results: Results) -> list[str]:
    """Return which trials are as fast as the fastest, as far as was measured."""
    if not (others := results.as_fast):
        return []
    numbers = ", ".join(str(trial.number) for trial in others)
    return [f"Within the noise of {results.agreement:.0%}, as fast: {counted(len(others), 'trial{s}')} ({numbers})."]


def to_set(results: Results, global_tokens: int, search: TuneConfig) -> list[str]:
    """Return the largest token budget that fits, and for a search over budgets alone the options to set."""
    best, largest = results.best, results.largest
    assert best is not None
    assert largest is not None
    lines = [f"Largest budget that fits: {largest.settings.tokens:,} tokens, {_memory(largest.measurement)}."]
    if max(trial.settings.tokens for trial in results.trials) == largest.settings.tokens < results.space.budgets[-1]:
        lines.append(
            "No larger one was tried: --tune.search.max_trials or time_budget_s ended the search, or it would not fit."
        )
    if results.space.varied != ["tokens"] or search.keep_global_tokens:
        return lines
    if search.inference:
        return [*lines, f"To set where a model predicts: {best.settings.tokens} tokens a batch."]
    at_once = best.settings.tokens * best.settings.workers
    steps = max(1, round(global_tokens / at_once))
    return [*lines, f"To set: --batch.tokens {best.settings.tokens} --batch.global_tokens {steps * at_once}"]


def _from_any_folder(section: DataSection) -> DataSection:
    """The data, by absolute paths."""
    sources = section.source if section.source == [SAMPLE] else [*map(absolute_path, section.source)]
    store = None if section.store is None else absolute_path(section.store)
    held_out = [*map(absolute_path, section.labels.validation_source)]
    labels = section.labels.model_copy(update={"validation_source": held_out})
    return section.model_copy(update={"source": sources, "store": store, "labels": labels})


def _comment(path: Path, results: Results, search: TuneConfig) -> str:
    best, own, space = results.best, results.own, results.space
    assert best is not None
    lines = [
        f"{speed_text(best.measurement)}, {_memory(best.measurement)}: the fastest of {len(results.trials)} "
        f"configurations tried of {len(space)},",
        f"by esmeray tune ({search.search.algorithm}, seed {search.search.seed}, "
        f"{datetime.now(UTC):%Y-%m-%d}): trial {best.number} of {path.parent}.",
        *noise_lines(results),
        *(["Forward passes alone were measured, without gradients."] if search.inference else []),
    ]
    if own is not None and own is not best:
        ratio = (best.measurement.tokens_per_s or 0.0) / (own.measurement.tokens_per_s or 1.0)
        lines.append(
            f"It is {ratio:.2f} times the speed of {settings_text(own.settings, space.varied)}, "
            f"{speed_text(own.measurement)}."
        )
    lines += [
        "The optimizer's step has the tokens that it had before."
        if search.keep_global_tokens
        else "A step is one batch of each worker, so training may come to another result.",
        "",
        f"  python train_ray.py --config {path}",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def nothing_fits(results: Results) -> ResourceError:
    """The refusal where no configuration ran and left the margin free."""
    tried = [trial.measurement for trial in results.trials]
    reason = next((f"; the first failure: {m.reason}" for m in tried if m.status not in ("ok", "pruned")), "")
    return ResourceError(
        f"no configuration of {len(tried)} fits and leaves {results.margin:.0%} of the memory free "
        f"({results.outcomes()}{reason}): offer smaller budgets by --tune.space.tokens with a lower data.max_length, "
        "gradient checkpointing or a higher ZeRO stage, or take a smaller backbone"
    )


def describe(trial: Trial, results: Results) -> str:
    what, measurement = settings_text(trial.settings, results.space.varied), trial.measurement
    if measurement.status == "ok":
        remark = "" if measurement.fits(results.margin) else f", which leaves less than {results.margin:.0%} free"
        return f"{what}: {speed_text(measurement)}, {_memory(measurement)}{remark}"
    if measurement.status == "pruned":
        return f"{what}: stopped at {speed_text(measurement)}"
    status = STATUSES[measurement.status]
    return f"{what}: {status} ({measurement.reason.removeprefix(f'{status}: ')})"


def _memory(measurement: Measurement) -> str:
    return f"peak {memory_text(measurement.peak_memory_bytes)} of {memory_text(measurement.total_memory_bytes)}"
