"""What a throughput search leaves behind: best.yaml, pareto.csv, the report, and a table for the terminal.

In: the trials and the experiment that was searched. Nothing here measures or decides.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import ResourceError
from common.publishing import write_atomically
from dataset.store.conversion import SAMPLE
from train_config.loading import dump_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from tuning.limits import find_limit
from tuning.settings import Settings
from tuning.space import SearchSpace
from tuning.tune_trials import (
    NAMES,
    Trial,
    best_trial,
    completed,
    memory_text,
    noise_text,
    pareto,
    settings_text,
    speed,
    value_text,
)

SHOWN = 5
"""Configurations in the table."""


def write_best(
    path: Path, best: Trial, trials: Sequence[Trial], space: SearchSpace, config: Config, search: TuneConfig
) -> None:
    """Write the experiment with the fastest settings, with a comment that says how it was found.

    Args:
        path: best.yaml, replaced if it is there.
        best: its trial.
        trials: all of them.
        space: what was searched.
        config: the experiment, with absolute paths.
        search: the settings of the search.
    """
    fastest = Settings(**best.settings).applied(config, search.keep_global_tokens)  # type: ignore[arg-type]
    write_atomically(path, _comment(path, best, trials, space, search) + dump_config(_runnable(fastest)))


def _runnable(config: Config) -> Config:
    """Under a name of its own, as its batches are not those of the experiment's checkpoints, and from any folder."""
    run = config.run.model_copy(update={"name": f"{config.run.name}-fastest", "resume": "allow"})
    section = config.data
    sources = [source if source == SAMPLE else _absolute(source) for source in section.source]
    store = None if section.store is None else _absolute(section.store)
    held_out = [_absolute(source) for source in section.labels.validation_source]
    labels = section.labels.model_copy(update={"validation_source": held_out})
    data = section.model_copy(update={"source": sources, "store": store, "labels": labels})
    return config.model_copy(update={"run": run, "data": data})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _comment(path: Path, best: Trial, trials: Sequence[Trial], space: SearchSpace, search: TuneConfig) -> str:
    own = next((t for t in completed(trials) if Settings(**t.settings) == space.default), None)  # type: ignore[arg-type]
    tried = sum(not trial.is_ruled_out for trial in trials)
    lines = [
        f"{speed(best):,.0f} real tokens/s{noise_text(best)}, {_memory(best)}: the fastest of {tried} configurations "
        f"tried of {len(space)},",
        f"by train_ray.py --tune ({search.search.algorithm}, seed {search.search.seed}, "
        f"{datetime.now(UTC):%Y-%m-%d}): trial {best.number} of {path.with_name('trials.jsonl')}.",
    ]
    if own is not None and own is not best:
        lines.append(
            f"It is {speed(best) / speed(own):.2f} times the speed of {settings_text(own.settings, space.varied)}, "
            f"{speed(own):,.0f} tokens/s{noise_text(own)}."
        )
    lines += [
        "The optimizer's step has the tokens that it had before."
        if search.keep_global_tokens
        else "A step is one batch of each worker, so training may come to another result.",
        "",
        f"  python train_ray.py --config {path}",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def write_pareto(path: Path, trials: Sequence[Trial], memory_margin: float) -> None:
    """Write the trials, measured to the end, that no other beats in both speed and peak memory, the fastest first.

    Columns: trial, tokens_per_s, peak_memory_bytes, total_memory_bytes, fits (1 if the margin stays free), settings.
    """
    rows: list[dict[str, Any]] = [
        {
            "trial": trial.number,
            "tokens_per_s": f"{speed(trial):.1f}",
            "peak_memory_bytes": trial.peak_bytes,
            "total_memory_bytes": trial.total_bytes,
            "fits": int(trial.fits(memory_margin)),
            **trial.settings,
        }
        for trial in pareto(trials)
    ]
    header = ["trial", "tokens_per_s", "peak_memory_bytes", "total_memory_bytes", "fits", *NAMES]
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def nothing_fits(trials: Sequence[Trial]) -> ResourceError:
    """The refusal where no configuration ran and left the margin free."""
    counts = Counter("out of memory's margin" if t.status == "ok" else t.outcome for t in trials)
    outcomes = ", ".join(f"{count} {word}" for word, count in counts.most_common()) or "none was measured"
    reason = next((f"; the first: {t.reason}" for t in trials if t.status not in ("ok", "pruned") and t.reason), "")
    return ResourceError(
        f"no configuration of {len(trials)} fits ({outcomes}{reason}): offer smaller budgets by --tune.space.tokens "
        "with a lower data.max_length, gradient checkpointing or a higher ZeRO stage, or take a smaller backbone"
    )


def print_table(trials: Sequence[Trial], space: SearchSpace, memory_margin: float, console: Console) -> None:
    """The fastest that fit, with what limits each, and what became of the others."""
    ranked = sorted((t for t in completed(trials) if t.fits(memory_margin)), key=speed, reverse=True)
    table = Table(title=f"The fastest {min(SHOWN, len(ranked))} of {len(trials)} configurations")
    for heading in ("trial", *(NAMES[name] for name in space.varied), "tokens/s", "peak memory", "limited by"):
        table.add_column(heading, justify="right" if heading in ("trial", "tokens/s", "peak memory") else "left")
    for place, trial in enumerate(ranked[:SHOWN]):
        slower = [other for other in trials if other not in ranked[:place]]
        limit = find_limit(slower, space.values, memory_margin).kind
        values = [value_text(name, trial.settings[name]) for name in space.varied]
        table.add_row(str(trial.number), *values, f"{speed(trial):,.0f}", memory_text(trial.peak_bytes), limit)
    console.print(table)
    counts = Counter(trial.outcome for trial in trials)
    console.print(", ".join(f"{count} {word}" for word, count in counts.most_common()), highlight=False)
    best = best_trial(trials, memory_margin)
    if best is not None:
        console.print(find_limit(trials, space.values, memory_margin).summary, highlight=False)


def describe(trial: Trial, space: SearchSpace, memory_margin: float) -> str:
    """A trial in a line, for the terminal."""
    what = settings_text(trial.settings, space.varied)
    if trial.status == "ok":
        remark = "" if trial.fits(memory_margin) else f", which leaves less than {memory_margin:.0%} free"
        return f"{what}: {speed(trial):,.0f} tokens/s{noise_text(trial)}, {_memory(trial)}{remark}"
    if trial.status == "pruned" and trial.tokens_per_s is not None:
        return f"{what}: stopped at {trial.tokens_per_s:,.0f} tokens/s{noise_text(trial)}"
    return f"{what}: {trial.outcome} ({trial.reason})"


def _memory(trial: Trial) -> str:
    if trial.peak_bytes is None:
        return "peak memory not known"
    return f"peak {memory_text(trial.peak_bytes)} of {memory_text(trial.total_bytes)}"
