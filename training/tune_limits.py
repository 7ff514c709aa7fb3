"""What keeps the fastest configuration of a search from being faster, in words, with what to try next.

In: the trials. Out: a :class:`Limit`: the loader, compute, memory or communication, what shows it, and advice. The
shares of a step tell what the time goes into; the trials next to the best, which differ from it in one setting, tell
what a change gave. Advice names settings by their keys, and only what was not tried already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from monitoring.tune_trials import (
    NAMES,
    STATUSES,
    Space,
    Trial,
    Value,
    best_trial,
    budget_setting,
    measured,
    memory_text,
    neighbours,
    speed,
    value_text,
    values_of,
    varied,
)

LOADER_SHARE = 0.08
"""From here on, waiting for batches is what limits: the loader should be hidden behind the computation."""
COMMUNICATION_SHARE = 0.15
"""From here on, waiting for other workers is what limits."""
OPTIMIZER_SHARE = 0.15
"""From here on, the optimizer's update is worth spreading over more tokens."""
RISE = 0.03
"""By how much the largest budget that fits must beat the next smaller one for memory to be what limits."""

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


@dataclass(frozen=True)
class _Around:
    """The best trial with all others."""

    best: Trial
    trials: Sequence[Trial]
    space: Space
    margin: float

    @property
    def budget(self) -> str:
        return budget_setting(self.trials, self.space)

    def share(self, phase: str) -> float:
        return self.best.shares.get(phase, 0.0)

    def tried(self, name: str) -> list:
        return values_of(name, [trial for trial in self.trials if not trial.is_ruled_out], {})

    def is_largest(self, name: str) -> bool:
        """Whether no larger value of the setting was tried than that of the best."""
        mine = self.best.settings.get(name)
        return all(not _larger(value, mine) for value in self.tried(name))

    def of_kind(self) -> list[Trial]:
        """Trials that differ from the best in what memory hardly depends on and in the budget."""
        same = ("amp_dtype", "gradient_checkpointing", "compile", "stage", "workers")
        mine = self.best.settings
        return [t for t in self.trials if all(t.settings.get(name) == mine.get(name) for name in same)]


def find_limit(trials: Sequence[Trial], space: Space, margin: float) -> Limit:
    """What limits the fastest configuration that fits.

    Args:
        trials: all of the search.
        space: values of each setting.
        margin: share of the memory that has to stay free.
    """
    best = best_trial(trials, margin)
    if best is None:
        return _nothing_found(trials, margin)
    around = _Around(best, trials, space, margin)
    evidence = [*_shares(around), *_memory_evidence(around), *_neighbour_sentences(around)]
    waiting, talking = around.share("data_wait"), around.share("communication")
    if waiting >= LOADER_SHARE and waiting >= talking:
        return Limit("loader", _loader_summary(waiting), evidence, list(_loader_advice(around)))
    if talking >= COMMUNICATION_SHARE:
        summary = f"Communication limits: {talking:.0%} of a step goes into it, where the devices don't compute."
        return Limit("communication", summary, evidence, list(_communication_advice(around)))
    blocked, rise = _memory_bound(around), _rise(around)
    if blocked is not None and rise is not None and rise >= RISE:
        summary = (
            f"Memory limits: {_budget_text(around, best)} is the largest budget that fits, and speed was still rising "
            f"with it (by {rise:.0%} from the budget below)."
        )
        return Limit("memory", summary, evidence, list(_memory_advice(around)))
    if not best.shares:
        summary = "What limits is not known: no shares of a step were measured, and memory is not what ends the budget."
        return Limit("unknown", summary, evidence, list(_compute_advice(around)))
    busy = around.share("forward") + around.share("backward") + around.share("optimizer")
    summary = (
        f"Compute limits: {busy:.0%} of a step is the model's own work, with the loader and the memory keeping up."
    )
    return Limit("compute", summary, evidence, list(_compute_advice(around)))


def _nothing_found(trials: Sequence[Trial], margin: float) -> Limit:
    """No trial gave a configuration that can be used."""
    reasons = Counter(trial.outcome for trial in trials)
    over = sum(trial.status == "ok" and not trial.fits(margin) for trial in trials)
    evidence = [f"{count} of {len(trials)} trials: {outcome}." for outcome, count in reasons.items()]
    if not trials:
        return Limit("unknown", "Nothing was tried yet.")
    if over + reasons[STATUSES["out_of_memory"]] > len(trials) / 2:
        summary = "Memory limits: no configuration fits it with the margin."
        advice = [f"Offer smaller values of space.tokens, or {KEYS['gradient_checkpointing']}: true."]
        return Limit("memory", summary, evidence, advice)
    return Limit("unknown", "No configuration was measured to the end.", evidence, ["Read the reasons in the table."])


def _shares(around: _Around) -> Iterator[str]:
    parts = [f"{_PHASES[name]} {around.share(name):.0%}" for name in _PHASES if around.share(name) >= 0.005]
    if parts:
        rest = 1.0 - sum(around.share(name) for name in _PHASES)
        parts += [f"the rest {rest:.0%}"] if rest >= 0.01 else []
        yield f"Of a step of the best: {', '.join(parts)}."


def _memory_evidence(around: _Around) -> Iterator[str]:
    best = around.best
    if best.peak_bytes is not None and best.memory_share is not None:
        yield (
            f"The best takes {memory_text(best.peak_bytes)} at its peak, {best.memory_share:.0%} of "
            f"{memory_text(best.total_bytes)}; {1 - around.margin:.0%} may be used."
        )
    blocked = _memory_bound(around)
    if blocked is not None:
        how = "ran out of memory" if blocked.status == "out_of_memory" else "did not leave the margin free"
        yield f"A budget of {_budget_text(around, blocked)} {how} (trial {blocked.number})."
    rise = _rise(around)
    if rise is not None:
        yield f"It is {abs(rise):.0%} {'faster' if rise >= 0 else 'slower'} than the fastest of the budget below."


def _neighbour_sentences(around: _Around) -> Iterator[str]:
    for name in varied(around.trials, around.space):
        for other in neighbours(around.best, around.trials, name):
            value = f"{NAMES[name]} {value_text(name, other.settings.get(name))}"
            if other.tokens_per_s is None:
                yield f"With {value}: {other.outcome} (trial {other.number})."
                continue
            change = speed(other) / speed(around.best) - 1.0
            stopped = ", stopped early" if other.status == "pruned" else ""
            yield f"With {value}: {change:+.0%}{stopped} (trial {other.number})."


def _memory_bound(around: _Around) -> Trial | None:
    """The next larger budget of the same kind that memory ended; None where a larger one fitted or none was tried."""
    larger = [t for t in around.of_kind() if _larger(t.settings.get(around.budget), _mine(around))]
    if any(trial.status == "ok" and trial.fits(around.margin) for trial in larger):
        return None
    ended = [trial for trial in larger if trial.status == "out_of_memory" or not trial.fits(around.margin)]
    return min(ended, key=lambda trial: trial.settings[around.budget] or 0, default=None)  # type: ignore[arg-type, return-value]


def _rise(around: _Around) -> float | None:
    """By how much the best is faster than the fastest of its kind with the next smaller budget that was measured."""
    smaller = [t for t in measured(around.of_kind()) if _larger(_mine(around), t.settings.get(around.budget))]
    if not smaller:
        return None
    nearest = max(trial.settings[around.budget] for trial in smaller)  # type: ignore[type-var]
    fastest = max(speed(trial) for trial in smaller if trial.settings[around.budget] == nearest)
    return speed(around.best) / fastest - 1.0 if fastest else None


def _loader_summary(waiting: float) -> str:
    return (
        f"The loader limits: {waiting:.0%} of a step is spent waiting for batches; without it, the same configuration "
        f"would be up to {waiting / (1 - waiting):.0%} faster."
    )


def _loader_advice(around: _Around) -> Iterator[str]:
    mine = around.best.settings.get("num_workers")
    if around.is_largest("num_workers"):
        yield f"Offer more loader processes than {mine} (space.num_workers), as long as cores are free."
    else:
        yield "More loader processes were tried and did not help: cores are short, or the store is slow to read."
    if around.is_largest("prefetch"):
        prefetch = around.best.settings.get("prefetch")
        yield f"Offer a larger space.prefetch than {prefetch}, which evens out slow batches."
    yield "Keep the store on a disk of the node (data.stage_dir) with room for it in the page cache."


def _communication_advice(around: _Around) -> Iterator[str]:
    yield (
        "Raise batch.global_tokens, so that gradients are summed less often; this changes the training, so the "
        "learning rate may have to follow."
    )
    stage = around.best.settings.get("stage")
    if isinstance(stage, int) and stage > 0:
        yield f"Offer a lower ZeRO stage than {stage} (space.stage) if the memory allows it: it communicates less."
    if around.best.settings.get("workers") != 1:
        yield "Compare with fewer workers (space.workers), and check which link the workers talk over."


def _memory_advice(around: _Around) -> Iterator[str]:
    mine = around.best.settings
    if mine.get("gradient_checkpointing") is False and True not in around.tried("gradient_checkpointing"):
        yield "Offer checkpointing (space.gradient_checkpointing: [false, true]): more compute for much less memory."
    if mine.get("amp_dtype") == "none" and "bf16" not in around.tried("amp_dtype"):
        yield "Offer bf16 (space.amp_dtype): its activations take half."
    workers, stage = mine.get("workers"), mine.get("stage")
    if isinstance(workers, int) and workers > 1 and isinstance(stage, int) and stage < 3:
        yield f"Offer a higher ZeRO stage than {stage} (space.stage): workers then share more of the model's state."
    yield "Offer budgets between this one and the next (space.tokens), where global_tokens has such divisors."
    yield "A device with more memory, or deepspeed.offload_optimizer, would make room for larger batches."


def _compute_advice(around: _Around) -> Iterator[str]:
    mine = around.best.settings
    rise = _rise(around)
    if around.is_largest(around.budget) and rise is not None and rise >= RISE:
        yield (
            f"Offer budgets above {value_text(around.budget, _mine(around))} (space.{around.budget}): speed was still "
            "rising. They may not exceed batch.global_tokens."
        )
    if mine.get("amp_dtype") == "none" and "bf16" not in around.tried("amp_dtype"):
        yield "Offer bf16 (space.amp_dtype), which computes faster on most devices."
    if mine.get("gradient_checkpointing") is True and False not in around.tried("gradient_checkpointing"):
        yield "Offer gradient_checkpointing: false; recomputing costs about a third."
    if mine.get("compile") is False and True not in around.tried("compile"):
        yield "Offer compile (space.compile: [false, true]); it pays on a GPU for long runs."
    if around.share("optimizer") >= OPTIMIZER_SHARE:
        yield (
            f"The optimizer takes {around.share('optimizer'):.0%} of a step: a larger batch.global_tokens spreads it "
            "over more tokens, and changes the training."
        )
    yield "More devices (ray.num_workers), a faster one or a smaller backbone are what is left."


def _budget_text(around: _Around, trial: Trial) -> str:
    unit = "tokens" if around.budget == "tokens" else "sequences"
    return f"{value_text(around.budget, trial.settings.get(around.budget))} {unit}"


def _mine(around: _Around) -> Value:
    return around.best.settings.get(around.budget)


def _larger(left: object, right: object) -> bool:
    return isinstance(left, int) and isinstance(right, int) and left > right
