"""The results of a search: its fastest trials, within the noise of the measurements, and best.yaml."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from esmeray.common.errors import ResourceError
from esmeray.common.publishing import write_atomically
from esmeray.common.text import counted
from esmeray.dataset.section import DataSection
from esmeray.dataset.store.conversion import SAMPLE
from esmeray.train_config.loading import dump_config
from esmeray.train_config.natures import absolute_path
from esmeray.tuning.records import STATUSES, Job, Measurement, Trial, memory_text, settings_text
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace

NOISY = 1.1
"""Minimum ratio of the fastest to the slowest window at which a speed is shown with its windows."""


@dataclass(frozen=True)
class Results:
    """All trials of a search, in order; a share ``margin`` of the memory must stay free.

    Speeds that differ by less than ``agreement`` count as equal, given the differences between windows of one trial.
    """

    trials: Sequence[Trial]
    space: SearchSpace
    margin: float
    agreement: float = 0.0

    @property
    def measured(self) -> list[Trial]:
        """Trials with a speed, including those that were stopped early."""
        return [trial for trial in self.trials if trial.measurement.tokens_per_s is not None]

    @property
    def ranked(self) -> list[Trial]:
        """Trials that were fully measured and fit, fastest first."""
        complete = [trial for trial in self.trials if trial.measurement.status == "ok" and self.speed(trial)]
        return sorted(complete, key=self.speed, reverse=True)

    @property
    def best(self) -> Trial | None:
        return next(iter(self.ranked), None)

    @property
    def own(self) -> Trial | None:
        """The experiment's own configuration, if it was measured."""
        return next((trial for trial in self.measured if trial.settings == self.space.default), None)

    def outcomes(self) -> str:
        counts = Counter(STATUSES[trial.measurement.status] for trial in self.trials)
        return ", ".join(f"{count} {word}" for word, count in counts.most_common()) or "none measured"

    def speed(self, trial: Trial) -> float:
        return trial.measurement.speed(self.margin)


def speed_text(measurement: Measurement) -> str:
    """Return tokens per second, with the windows if they differ: ``900 tokens/s (windows 800 to 990)``."""
    slowest = min(measurement.windows, default=0.0)
    fastest = max(measurement.windows, default=0.0)
    # The windows of a steady speed add no information.
    noise = f" (windows {slowest:,.0f} to {fastest:,.0f})" if fastest > NOISY * slowest else ""
    return f"{measurement.tokens_per_s or 0.0:,.0f} tokens/s{noise}"


def write_best(best: Trial, results: Results, job: Job) -> None:
    """Write the experiment with the fastest settings, and a comment on how they were found.

    It runs from any folder and has its own name, since the experiment's checkpoints have other batches.
    """
    fastest = job.trial_config(best.settings)
    run = job.config.run.model_copy(update={"name": f"{job.config.run.name}-fastest", "resume": "allow"})
    runnable = fastest.model_copy(update={"run": run, "data": _from_any_folder(fastest.data)})
    write_atomically(job.folder.best, _comment(best, results, job) + dump_config(runnable))


def noise_lines(results: Results) -> list[str]:
    """Return a line with the trials whose speed equals the fastest within the noise of windows."""
    fastest, *others = results.ranked
    lowest = (1 - results.agreement) * results.speed(fastest)
    as_fast = [str(trial.number) for trial in others if results.speed(trial) >= lowest]
    if not as_fast:
        return []
    trials = f"{counted(len(as_fast), 'trial{s}')} ({', '.join(as_fast)})"
    return [f"Equally fast within the noise of {results.agreement:.0%}: {trials}."]


def to_set(best: Trial, results: Results, global_tokens: int, search: TuneConfig) -> list[str]:
    """Return the largest token budget that fits, and for a search over budgets alone the options to set."""
    # Reported even if it is slow: it shows the capacity of the memory.
    largest = max(filter(results.speed, results.measured), key=lambda trial: trial.settings.tokens)
    lines = [f"Largest token budget that fits: {largest.settings.tokens:,} tokens, {_memory(largest.measurement)}."]
    # A larger budget that failed was reported with its trial. One that was not tried would look like out of memory.
    if max(trial.settings.tokens for trial in results.trials) == largest.settings.tokens < results.space.budgets[-1]:
        lines.append(
            "No larger budget was tried: --tune.search.max_trials or time_budget_s ended the search, or it "
            "would not fit."
        )
    # For other searches best.yaml contains all settings.
    if results.space.varied != ["tokens"] or search.keep_global_tokens:
        return lines
    if search.inference:
        return [*lines, f"For inference, set {best.settings.tokens} tokens per batch."]
    at_once = best.settings.tokens * best.settings.workers
    # A global batch holds whole micro-batches of all workers: round to the nearest multiple.
    steps = max(1, round(global_tokens / at_once))
    return [*lines, f"To set: --batch.tokens {best.settings.tokens} --batch.global_tokens {steps * at_once}"]


def _from_any_folder(section: DataSection) -> DataSection:
    """Return the data section with absolute paths."""
    sources = section.source if section.source == [SAMPLE] else [*map(absolute_path, section.source)]
    store = None if section.store is None else absolute_path(section.store)
    held_out = [*map(absolute_path, section.labels.validation_source)]
    labels = section.labels.model_copy(update={"validation_source": held_out})
    return section.model_copy(update={"source": sources, "store": store, "labels": labels})


def _comment(best: Trial, results: Results, job: Job) -> str:
    search = job.search
    own = results.own
    lines = [
        f"{speed_text(best.measurement)}, {_memory(best.measurement)}: the fastest of {len(results.trials)} "
        f"tried configurations (of {len(results.space)}),",
        f"found by esmeray tune ({search.search.algorithm}, seed {search.search.seed}, "
        f"{datetime.now(UTC):%Y-%m-%d}): trial {best.number} of {job.folder.path}.",
        *noise_lines(results),
        *(["Only forward passes were measured, without gradients."] if search.inference else []),
    ]
    if own is not None and own is not best:
        ratio = (best.measurement.tokens_per_s or 0.0) / (own.measurement.tokens_per_s or 1.0)
        lines.append(
            f"It is {ratio:.2f} times the speed of {settings_text(own.settings, results.space.varied)}, "
            f"{speed_text(own.measurement)}."
        )
    lines += [
        "The global batch is unchanged."
        if search.keep_global_tokens
        else "A step is one batch per worker, so the global batch has changed and training may give a different "
        "result.",
        "",
        f"  python train_ray.py --config {job.folder.best}",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def nothing_fits(results: Results) -> ResourceError:
    """Return the error if no configuration ran and left the margin free."""
    tried = [trial.measurement for trial in results.trials]
    # The first failure belongs to the experiment's own settings, or to the nearest valid ones.
    reason = next((f"; the first failure: {m.reason}" for m in tried if m.status not in ("ok", "pruned")), "")
    return ResourceError(
        f"none of {len(tried)} configurations fits and leaves {results.margin:.0%} of the memory free "
        f"({results.outcomes()}{reason}): add smaller budgets to --tune.space.tokens with a lower "
        "data.max_length, gradient checkpointing or a higher ZeRO stage, or use a smaller backbone"
    )


def describe(trial: Trial, results: Results) -> str:
    what = settings_text(trial.settings, results.space.varied)
    measurement = trial.measurement
    if measurement.status == "ok":
        remark = "" if measurement.fits(results.margin) else f", which leaves less than {results.margin:.0%} free"
        return f"{what}: {speed_text(measurement)}, {_memory(measurement)}{remark}"
    if measurement.status == "pruned":
        return f"{what}: stopped at {speed_text(measurement)}"
    status = STATUSES[measurement.status]
    return f"{what}: {status} ({measurement.reason.removeprefix(f'{status}: ')})"


def _memory(measurement: Measurement) -> str:
    return f"peak {memory_text(measurement.peak_memory_bytes)} of {memory_text(measurement.total_memory_bytes)}"
