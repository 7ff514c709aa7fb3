"""The limit of a configuration of a search, from its trials, through the one adviser (:mod:`monitoring.advice`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from monitoring.advice import Facts, advise, what_limits
from tuning.records import Trial
from tuning.results import Results
from tuning.settings import KEYS, NAMES, STATUSES, Settings, memory_text, value_text
from tuning.space import needs_at_least

_PHASES = {
    "data_wait": "waiting for batches",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "communication": "communication",
}
_SETTINGS = ("tokens", "precision", "gradient_checkpointing", "compile", "num_workers", "stage", "workers")
"""Settings that the advice names."""
_SEARCHED = ("loading", "communication", "memory", "compute")
"""Topics of advice that are about the configuration's step."""


@dataclass(frozen=True)
class Limit:
    """Topic (loading, communication, memory, compute or unknown), summary without a full stop, and sentences."""

    topic: str
    summary: str
    evidence: list[str]
    advice: list[str]


def find_limit(trial: Trial, results: Results) -> Limit:
    """Return what limits a configuration that was measured to the end."""
    facts = _facts(trial, results)
    limit = what_limits(facts)
    evidence = [*_shares(trial), *_memory(trial, results.margin), *_neighbours(trial, results)]
    if limit is None:
        return Limit("unknown", "What limits is not known: no shares of a step were measured", evidence, [])
    further = [str(advice) for advice in advise(facts) if advice.actions and advice.topic not in _SEARCHED]
    return Limit(limit.topic, limit.finding, evidence, [*(action.text for action in limit.actions), *further])


def _facts(trial: Trial, results: Results) -> Facts:
    settings, measurement, others = trial.settings, trial.measurement, results.trials
    shares: dict[str, Any] = dict(measurement.shares)
    if settings.workers == 1:  # the rest are the agreements of a worker with itself
        shares.pop("communication", None)
    tried = {KEYS[name] for name in NAMES if any(_differs_in(name, settings, other.settings) for other in others)}
    if not any(other.settings.tokens > settings.tokens for other in others):
        tried.discard(KEYS["tokens"])
    return Facts(
        **shares,
        memory=measurement.memory_share,
        memory_limits=_is_blocked(settings, results),
        rise=_rise(trial, results),
        **{name: getattr(settings, name) for name in _SETTINGS},
        tried=frozenset(tried),
    )


def _is_blocked(settings: Settings, results: Results) -> bool:
    """Return whether the next larger budget needs at least the memory of a configuration that was too large."""
    larger = [replace(settings, tokens=tokens) for tokens in results.space.budgets if tokens > settings.tokens][:1]
    too_large = [o.settings for o in results.trials if o.measurement.is_too_large(results.margin)]
    return any(needs_at_least(following, other) for following in larger for other in too_large)


def _rise(trial: Trial, results: Results) -> float | None:
    """Speed relative to the next smaller budget that was measured with all else alike, minus 1."""
    smaller = [
        other
        for other in results.measured
        if _differs_in("tokens", trial.settings, other.settings) and other.settings.tokens < trial.settings.tokens
    ]
    nearest = max(smaller, key=lambda other: other.settings.tokens, default=trial).measurement.tokens_per_s
    own = trial.measurement.tokens_per_s
    return own / nearest - 1 if smaller and own and nearest else None


def _shares(trial: Trial) -> Iterator[str]:
    shares = trial.measurement.shares
    parts = [f"{text} {shares[name]:.0%}" for name, text in _PHASES.items() if shares.get(name, 0.0) >= 0.005]
    if parts:
        yield f"Of a step: {', '.join(parts)}, the rest {max(0.0, 1 - sum(shares.values())):.0%}."


def _memory(trial: Trial, margin: float) -> Iterator[str]:
    measurement = trial.measurement
    if measurement.memory_share is not None:
        yield (
            f"Peak memory is {memory_text(measurement.peak_memory_bytes)}, {measurement.memory_share:.0%} of "
            f"{memory_text(measurement.total_memory_bytes)}; {1 - margin:.0%} may be used."
        )


def _neighbours(trial: Trial, results: Results) -> Iterator[str]:
    for name in NAMES:
        for other in results.trials:
            if _differs_in(name, trial.settings, other.settings):
                value = f"{NAMES[name]} {value_text(name, getattr(other.settings, name))}"
                speed, own = other.measurement.tokens_per_s, trial.measurement.tokens_per_s or 1.0
                outcome = STATUSES[other.measurement.status] if speed is None else f"{speed / own - 1:+.0%}"
                yield f"With {value}: {outcome} (trial {other.number})."


def _differs_in(name: str, settings: Settings, other: Settings) -> bool:
    """Return whether two configurations differ in this setting and in no other."""
    return [key for key in NAMES if getattr(settings, key) != getattr(other, key)] == [name]
