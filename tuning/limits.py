"""What keeps the fastest configuration of a search from being faster, in words, with what to try next.

In: the trials. Out: a :class:`Limit`: the loader, compute, memory or communication, what shows it, and advice. The
shares of a step tell what the time goes into; the trials next to the best, which differ from it in one setting, tell
what a change gave. What to try next is :mod:`tuning.tune_advice`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tuning.tune_advice import (
    RISE,
    Around,
    advice_where_nothing_fits,
    communication_advice,
    compute_advice,
    loader_advice,
    memory_advice,
)
from tuning.tune_trials import (
    NAMES,
    STATUSES,
    Space,
    Trial,
    best_trial,
    memory_text,
    neighbours,
    speed,
    value_text,
    varied,
)

LOADER_SHARE = 0.08
"""From here on, waiting for batches is what limits: the loader should be hidden behind the computation."""
COMMUNICATION_SHARE = 0.15
"""From here on, exchanging with other workers, and waiting for them, is what limits."""

KEYS = {
    "tokens": "batch.tokens",
    "batch_size": "batch.batch_size",
    "num_workers": "data.num_workers",
    "prefetch": "data.prefetch",
    "amp_dtype": "training.amp_dtype",
    "gradient_checkpointing": "model.backbone.gradient_checkpointing",
    "compile": "training.compile",
    "stage": "deepspeed.stage",
    "workers": "ray.num_workers",
}
"""Where each setting of a search stands in an experiment's config."""

_PHASES = {
    "data_wait": "waiting for batches",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "communication": "communication",
}


@dataclass(frozen=True)
class Limit:
    """What limits the best configuration.

    Attributes:
        kind: what; unknown where nothing was measured.
        summary: in a sentence.
        evidence: what shows it, and what the settings next to the best gave, a sentence each.
        advice: what to try next, a sentence each.
    """

    kind: Literal["loader", "compute", "memory", "communication", "unknown"]
    summary: str
    evidence: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def find_limit(trials: Sequence[Trial], space: Space, margin: float) -> Limit:
    """What limits the fastest configuration that fits.

    Args:
        trials: all of the search.
        space: values of each setting.
        margin: share of the memory that has to stay free.
    """
    best = best_trial(trials, margin)
    if best is None:
        return _nothing_found(trials, space, margin)
    around = Around(best, trials, space, margin)
    evidence = [*_shares(around), *_memory_evidence(around), *_neighbour_sentences(around)]
    waiting, talking = around.share("data_wait"), around.share("communication")
    if waiting >= LOADER_SHARE and waiting >= talking:
        return Limit("loader", _loader_summary(waiting), evidence, list(loader_advice(around)))
    if talking >= COMMUNICATION_SHARE:
        summary = (
            f"Communication limits: {talking:.0%} of a step goes into exchanging gradients and waiting for the slowest "
            "worker to come to it."
        )
        return Limit("communication", summary, evidence, list(communication_advice(around)))
    blocked, rise = around.memory_bound(), around.rise()
    if blocked is not None and rise is not None and rise >= RISE:
        summary = (
            f"Memory limits: {_budget_text(around, best)} is the largest budget that fits, and speed was still rising "
            f"with it (by {rise:.0%} from the budget below)."
        )
        return Limit("memory", summary, evidence, list(memory_advice(around)))
    if not best.shares:
        summary = "What limits is not known: no shares of a step were measured, and memory is not what ends the budget."
        return Limit("unknown", summary, evidence, list(compute_advice(around)))
    busy = around.share("forward") + around.share("backward") + around.share("optimizer")
    summary = (
        f"Compute limits: {busy:.0%} of a step is the model's own work, with the loader and the memory keeping up."
    )
    return Limit("compute", summary, evidence, list(compute_advice(around)))


def _nothing_found(trials: Sequence[Trial], space: Space, margin: float) -> Limit:
    """No trial gave a configuration that can be used."""
    reasons = Counter(trial.outcome for trial in trials)
    over = sum(trial.status == "ok" and not trial.fits(margin) for trial in trials)
    evidence = [f"{count} of {len(trials)} trials: {outcome}." for outcome, count in reasons.items()]
    if not trials:
        return Limit("unknown", "Nothing was tried yet.")
    if over + reasons[STATUSES["out_of_memory"]] > len(trials) / 2:
        summary = "Memory limits: no configuration fits it with the margin."
        return Limit("memory", summary, evidence, list(advice_where_nothing_fits(trials, space)))
    return Limit("unknown", "No configuration was measured to the end.", evidence, ["Read the reasons in the table."])


def _shares(around: Around) -> Iterator[str]:
    parts = [f"{_PHASES[name]} {around.share(name):.0%}" for name in _PHASES if around.share(name) >= 0.005]
    if parts:
        rest = 1.0 - sum(around.share(name) for name in _PHASES)
        parts += [f"the rest {rest:.0%}"] if rest >= 0.01 else []
        yield f"Of a step of the best: {', '.join(parts)}."


def _memory_evidence(around: Around) -> Iterator[str]:
    best = around.best
    if best.peak_bytes is not None and best.memory_share is not None:
        yield (
            f"The best takes {memory_text(best.peak_bytes)} at its peak, {best.memory_share:.0%} of "
            f"{memory_text(best.total_bytes)}; {1 - around.margin:.0%} may be used."
        )
    blocked = around.memory_bound()
    if blocked is not None:
        how = "ran out of memory" if blocked.status == "out_of_memory" else "did not leave the margin free"
        yield f"A budget of {_budget_text(around, blocked)} {how} (trial {blocked.number})."
    rise = around.rise()
    if rise is not None:
        how = "as fast as" if abs(rise) < 0.005 else f"{abs(rise):.0%} {'faster' if rise >= 0 else 'slower'} than"
        yield f"It is {how} the fastest of the budget below."


def _neighbour_sentences(around: Around) -> Iterator[str]:
    for name in varied(around.trials, around.space):
        for other in neighbours(around.best, around.trials, name):
            value = f"{NAMES[name]} {value_text(name, other.settings.get(name))}"
            if other.tokens_per_s is None:
                yield f"With {value}: {other.outcome} (trial {other.number})."
                continue
            change = speed(other) / speed(around.best) - 1.0
            stopped = ", stopped early" if other.status == "pruned" else ""
            how = "as fast" if abs(change) < 0.005 else f"{change:+.0%}"
            yield f"With {value}: {how}{stopped} (trial {other.number})."


def _loader_summary(waiting: float) -> str:
    return (
        f"The loader limits: {waiting:.0%} of a step is spent waiting for batches; without it, the same configuration "
        f"would be up to {waiting / (1 - waiting):.0%} faster."
    )


def _budget_text(around: Around, trial: Trial) -> str:
    unit = "tokens" if around.budget == "tokens" else "sequences"
    return f"{value_text(around.budget, trial.settings.get(around.budget))} {unit}"
