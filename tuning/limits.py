"""The limit of a configuration of a search, from its trials, through the one adviser (:mod:`monitoring.advice`)."""

from dataclasses import replace
from typing import Any, NamedTuple

from monitoring.advice import Facts, advise, what_limits
from tuning.records import Trial
from tuning.results import Results
from tuning.settings import KEYS, NAMES, Settings
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


class Limit(NamedTuple):
    """Topic (loading, communication, memory, compute or unknown), sentence without a full stop, what to try next."""

    topic: str
    summary: str
    advice: list[str]


def find_limit(trial: Trial, results: Results) -> Limit:
    """Return what limits a configuration that was measured to the end."""
    facts = _facts(trial, results)
    limit = what_limits(facts)
    if limit is None:
        return Limit("unknown", "What limits is not known: no shares of a step were measured", [])
    further = [str(advice) for advice in advise(facts) if advice.actions and advice.topic not in _SEARCHED]
    return Limit(limit.topic, limit.finding, [*(action.text for action in limit.actions), *further])


def shares_text(trial: Trial) -> str:
    """The phases of a step as shares of its time, in a line."""
    shares = trial.measurement.shares
    phases = [f"{text} {shares[name]:.0%}" for name, text in _PHASES.items() if shares.get(name, 0.0) >= 0.005]
    return f"Of a step: {', '.join(phases)}, the rest {max(0.0, 1 - sum(shares.values())):.0%}." if phases else ""


def _facts(trial: Trial, results: Results) -> Facts:
    settings, measurement = trial.settings, trial.measurement
    shares: dict[str, Any] = dict(measurement.shares)
    if settings.workers == 1:  # the rest are the agreements of a worker with itself
        shares.pop("communication", None)
    others = [other.settings for other in results.trials]
    tried = {KEYS[name] for name in NAMES if any(_differs_in(name, settings, other) for other in others)}
    if not any(other.tokens > settings.tokens for other in others):
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


def _differs_in(name: str, settings: Settings, other: Settings) -> bool:
    """Return whether two configurations differ in this setting and in no other."""
    return [key for key in NAMES if getattr(settings, key) != getattr(other, key)] == [name]
