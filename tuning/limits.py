"""The limit of a configuration of a search, from its trials, through the one adviser (:mod:`monitoring.advice`).

In: a configuration that was measured, and the others. Out: a :class:`Limit`. The shares of a step are its own; those of
the others that differ in one setting show what a change gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monitoring.advice import Facts, advise, what_limits
from tuning.journal import Trial
from tuning.settings import KEYS, NAMES, STATUSES, memory_text, value_text
from tuning.space import SearchSpace, needs_at_least

_PHASES = {
    "data_wait": "waiting for batches",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "communication": "communication",
}
_SEARCHED = ("loading", "communication", "memory", "compute")
"""Topics of advice that are about the configuration's step."""


@dataclass(frozen=True)
class Limit:
    """The limit of a configuration's speed.

    Attributes:
        topic: loading, communication, memory, compute or unknown.
        summary: a sentence without a full stop.
        evidence: what shows it, a sentence each.
        advice: what to try next, a sentence each.
    """

    topic: str
    summary: str
    evidence: list[str]
    advice: list[str]


def find_limit(trial: Trial, others: Sequence[Trial], space: SearchSpace, margin: float) -> Limit:
    """Return what limits a configuration.

    Args:
        trial: of the configuration, measured to the end.
        others: all configurations.
        space: what is searched.
        margin: share of the memory that has to stay free.
    """
    facts = _facts(trial, others, space, margin)
    limit = what_limits(facts)
    evidence = [*_shares(trial), *_memory(trial, facts, margin), *_neighbours(trial, others)]
    if limit is None:
        return Limit("unknown", "What limits is not known: no shares of a step were measured", evidence, [])
    further = [str(advice) for advice in advise(facts) if advice.actions and advice.topic not in _SEARCHED]
    return Limit(limit.topic, limit.finding, evidence, [*(action.text for action in limit.actions), *further])


def _facts(trial: Trial, others: Sequence[Trial], space: SearchSpace, margin: float) -> Facts:
    settings, measurement = trial.settings, trial.measurement
    shares: dict[str, Any] = dict(measurement.shares)
    if settings.workers == 1:  # what is left are the agreements of a worker with itself
        shares.pop("communication", None)
    tried = {KEYS[name] for name in NAMES if any(_differs_in(name, settings, other.settings) for other in others)}
    if not any(other.settings.tokens > settings.tokens for other in others):
        tried.discard(KEYS["tokens"])
    return Facts(
        **shares,
        memory=measurement.memory_share,
        memory_limits=_is_blocked(trial, others, space, margin),
        rise=_rise(trial, others),
        tokens=settings.tokens,
        amp_dtype=settings.amp_dtype,
        gradient_checkpointing=settings.gradient_checkpointing,
        compile=settings.compile,
        num_workers=settings.num_workers,
        stage=settings.stage,
        workers=settings.workers,
        tried=frozenset(tried),
    )


def _is_blocked(trial: Trial, others: Sequence[Trial], space: SearchSpace, margin: float) -> bool:
    """Return whether the next larger budget needs at least the memory of what did not fit."""
    larger = [tokens for tokens in space.budgets if tokens > trial.settings.tokens]
    if not larger:
        return False
    following = replace(trial.settings, tokens=larger[0])
    too_large = [other.settings for other in others if other.measurement.is_too_large(margin)]
    return any(needs_at_least(following, other) for other in too_large)


def _rise(trial: Trial, others: Sequence[Trial]) -> float | None:
    """Speed relative to the next smaller budget that was measured with all else alike, minus 1."""
    alike = {
        other.settings.tokens: other.measurement.tokens_per_s
        for other in others
        if replace(other.settings, tokens=trial.settings.tokens) == trial.settings and other.measurement.tokens_per_s
    }
    smaller = max((tokens for tokens in alike if tokens < trial.settings.tokens), default=None)
    own = trial.measurement.tokens_per_s
    return None if smaller is None or not own else own / (alike[smaller] or own) - 1


def _shares(trial: Trial) -> Iterator[str]:
    shares = trial.measurement.shares
    parts = [f"{text} {shares[name]:.0%}" for name, text in _PHASES.items() if shares.get(name, 0.0) >= 0.005]
    if parts:
        yield f"Of a step: {', '.join(parts)}, the rest {max(0.0, 1 - sum(shares.values())):.0%}."


def _memory(trial: Trial, facts: Facts, margin: float) -> Iterator[str]:
    measurement = trial.measurement
    if measurement.memory_share is not None:
        yield (
            f"Peak memory is {memory_text(measurement.peak_memory_bytes)}, {measurement.memory_share:.0%} of "
            f"{memory_text(measurement.total_memory_bytes)}; {1 - margin:.0%} may be used."
        )
    if facts.memory_limits:
        yield "The next larger token budget is out of memory, or does not leave the margin free."
    if facts.rise is not None:
        yield f"Compared with the next smaller token budget: {facts.rise:+.0%}."


def _neighbours(trial: Trial, others: Sequence[Trial]) -> Iterator[str]:
    for name in NAMES:
        for other in others:
            if not _differs_in(name, trial.settings, other.settings):
                continue
            value = f"{NAMES[name]} {value_text(name, getattr(other.settings, name))}"
            speed, own = other.measurement.tokens_per_s, trial.measurement.tokens_per_s or 1.0
            outcome = STATUSES[other.measurement.status] if speed is None else f"{speed / own - 1:+.0%}"
            stopped = ", stopped early" if other.measurement.status == "pruned" else ""
            yield f"With {value}: {outcome}{stopped} (trial {other.number})."


def _differs_in(name: str, settings: object, other: object) -> bool:
    """Return whether two configurations differ in this setting and in no other."""
    return [key for key in NAMES if getattr(settings, key) != getattr(other, key)] == [name]
