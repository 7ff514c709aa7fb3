"""What to try next after a throughput search, in words.

In: the fastest trial with all others, and the space. Out: sentences, for each of what can limit. Settings are named by
their keys, and only what was not tried already is advised: to add it to the space, or, where it is in the space, to let
the search come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tuning.tune_trials import (
    NAMES,
    Space,
    Trial,
    Value,
    budget_setting,
    measured,
    neighbours,
    speed,
    value_text,
    values_of,
)

OPTIMIZER_SHARE = 0.15
"""From here on, the optimizer's update is worth spreading over more tokens."""
RISE = 0.03
"""By how much the largest budget that fits must beat the next smaller one for memory to be what limits."""

_OFFER_CHECKPOINTING = "Offer checkpointing (space.gradient_checkpointing: [false, true])"
_OFFER_BF16 = "Offer bf16 (space.amp_dtype)"
_GO_ON = "raise search.max_trials or search.time_budget_s"


@dataclass(frozen=True)
class Around:
    """The best trial with all others.

    Attributes:
        best: the fastest that leaves the margin free.
        trials: all of the search, with the best.
        space: values of each setting.
        margin: share of the memory that has to stay free.
    """

    best: Trial
    trials: Sequence[Trial]
    space: Space
    margin: float

    @property
    def budget(self) -> str:
        """The setting that makes a batch larger."""
        return budget_setting(self.trials, self.space)

    def share(self, phase: str) -> float:
        """Of the best's step that goes into ``phase``; 0 where it was not measured."""
        return self.best.shares.get(phase, 0.0)

    def tried(self, name: str) -> list[Value]:
        """Values that were measured, or that another trial ruled out for the best's other settings."""
        return values_of(name, [*_not_ruled_out(self.trials), *neighbours(self.best, self.trials, name)], {})

    def mine(self, name: str) -> Value:
        """The best's value."""
        return self.best.settings.get(name)

    def has_larger(self, name: str) -> bool:
        """Whether a larger value of the setting was tried than that of the best."""
        return any(_larger(value, self.mine(name)) for value in self.tried(name))

    def suggest(self, name: str, wanted: Callable[[Value], bool], offer: str, why: str = "") -> Iterator[str]:
        """See :func:`_suggest`."""
        return _suggest(name, wanted, self.tried(name), self.space, offer, why)

    def of_kind(self) -> list[Trial]:
        """Trials that differ from the best in what memory hardly depends on and in the budget."""
        same = ("amp_dtype", "gradient_checkpointing", "compile", "stage", "workers")
        mine = self.best.settings
        return [t for t in self.trials if all(t.settings.get(name) == mine.get(name) for name in same)]

    def memory_bound(self) -> Trial | None:
        """The next larger budget of the kind that memory ended; None where a larger one fitted or none was tried."""
        larger = [t for t in self.of_kind() if _larger(t.settings.get(self.budget), self.mine(self.budget))]
        if any(trial.status == "ok" and trial.fits(self.margin) for trial in larger):
            return None
        ended = [trial for trial in larger if trial.status == "out_of_memory" or not trial.fits(self.margin)]
        return min(ended, key=lambda trial: trial.settings[self.budget] or 0, default=None)  # type: ignore[arg-type, return-value]

    def rise(self) -> float | None:
        """By how much the best is faster than the fastest of its kind with the next smaller budget measured."""
        mine = self.mine(self.budget)
        smaller = [t for t in measured(self.of_kind()) if _larger(mine, t.settings.get(self.budget))]
        if not smaller:
            return None
        nearest = max(trial.settings[self.budget] for trial in smaller)  # type: ignore[type-var]
        fastest = max(speed(trial) for trial in smaller if trial.settings[self.budget] == nearest)
        return speed(self.best) / fastest - 1.0 if fastest else None


def loader_advice(around: Around) -> Iterator[str]:
    """Where steps wait for batches."""
    processes, prefetch = around.mine("num_workers"), around.mine("prefetch")
    yield from around.suggest(
        "num_workers",
        lambda value: _larger(value, processes),
        f"Offer more loader processes than {processes} (space.num_workers)",
        ", as long as cores are free",
    )
    if around.has_larger("num_workers"):
        yield "More loader processes were tried and did not help: cores are short, or the store is slow to read."
    if processes != 0:  # which alone prefetch
        yield from around.suggest(
            "prefetch",
            lambda value: _larger(value, prefetch),
            f"Offer a larger space.prefetch than {prefetch}",
            ": it evens out slow batches",
        )
    yield "Keep the store on a disk of the node (data.stage_dir) with room for it in the page cache."


def communication_advice(around: Around) -> Iterator[str]:
    """Where workers wait for one another."""
    yield (
        "Raise batch.global_tokens, so that gradients are summed less often; this changes the training, so the "
        "learning rate may have to follow."
    )
    stage, workers = around.mine("stage"), around.mine("workers")
    if _larger(stage, 0):
        yield from around.suggest(
            "stage",
            lambda value: _larger(stage, value),
            f"Offer a lower ZeRO stage than {stage} (space.stage)",
            " if the memory allows it: it communicates less",
        )
    if workers != 1:
        yield from around.suggest(
            "workers",
            lambda value: _larger(workers, value),
            "Compare with fewer workers (space.workers)",
            ": on the CPU, each has more cores then",
        )
        # The trials do not tell on what they ran.
        yield (
            "Between GPUs or machines, check which link the workers talk over. On the CPU of one machine, they rather "
            "wait for each other: see whether other processes take its cores."
        )


def memory_advice(around: Around) -> Iterator[str]:
    """Where memory ended a budget while speed still rose with it (:meth:`Around.memory_bound` is some trial)."""
    if around.mine("gradient_checkpointing") is False:
        yield from around.suggest(
            "gradient_checkpointing", _is_on, _OFFER_CHECKPOINTING, ": more compute for much less memory"
        )
    if around.mine("amp_dtype") == "none":
        yield from around.suggest("amp_dtype", _is_bf16, _OFFER_BF16, ": its activations take half")
    stage = around.mine("stage")
    if _larger(around.mine("workers"), 1) and _larger(3, stage):
        yield from around.suggest(
            "stage",
            lambda value: _larger(value, stage),
            f"Offer a higher ZeRO stage than {stage} (space.stage)",
            ": workers then share more of the model's state",
        )
    yield from _budgets_between(around)
    yield "A device with more memory, or deepspeed.offload_optimizer, would make room for larger batches."


def compute_advice(around: Around) -> Iterator[str]:
    """Where the model's own work is what a step's time goes into."""
    name, budget, rise = around.budget, around.mine(around.budget), around.rise()
    if rise is not None and rise >= RISE:
        yield from around.suggest(
            name,
            lambda value: _larger(value, budget),
            f"Offer budgets above {value_text(name, budget)} (space.{name}, up to batch.global_tokens)",
            ": speed was still rising",
        )
    if around.mine("amp_dtype") == "none":
        yield from around.suggest("amp_dtype", _is_bf16, _OFFER_BF16, ": it computes faster on most devices")
    if around.mine("gradient_checkpointing") is True:
        yield from around.suggest(
            "gradient_checkpointing",
            lambda value: value is False,
            "Offer gradient_checkpointing: false",
            "; recomputing costs about a third",
        )
    if around.mine("compile") is False:
        yield from around.suggest(
            "compile", _is_on, "Offer compile (space.compile: [false, true])", "; it pays on a GPU for long runs"
        )
    if around.share("optimizer") >= OPTIMIZER_SHARE:
        yield (
            f"The optimizer takes {around.share('optimizer'):.0%} of a step: a larger batch.global_tokens spreads it "
            "over more tokens, and changes the training."
        )
    yield "More devices (ray.num_workers), a faster one or a smaller backbone are what is left."


def advice_where_nothing_fits(trials: Sequence[Trial], space: Space) -> Iterator[str]:
    """Where no trial left the memory margin free."""
    budget, tried = budget_setting(trials, space), _not_ruled_out(trials)
    budgets, checkpointing = values_of(budget, tried, {}), values_of("gradient_checkpointing", tried, {})
    yield from _suggest(
        budget,
        lambda value: all(_larger(other, value) for other in budgets),
        budgets,
        space,
        f"Offer smaller values of space.{budget}",
    )
    yield from _suggest("gradient_checkpointing", _is_on, checkpointing, space, _OFFER_CHECKPOINTING)


def _budgets_between(around: Around) -> Iterator[str]:
    """Budgets between the best's and the next that memory ended: larger is faster there, as far as is known."""
    name, blocked = around.budget, around.memory_bound()
    end, tried = None if blocked is None else blocked.settings[name], around.tried(name)
    yield from around.suggest(
        name,
        # One that was tried ran with other settings than these, and says nothing of those beside it.
        lambda value: value not in tried and _larger(value, around.mine(name)) and _larger(end, value),
        f"Offer budgets between this one and the next (space.{name}), where global_tokens has such divisors",
    )


def _suggest(
    name: str,
    wanted: Callable[[Value], bool],
    tried: Sequence[Value],
    space: Space,
    offer: str,
    why: str = "",
) -> Iterator[str]:
    """What to do for values of a setting that may help; nothing where one of them was tried.

    Args:
        name: the setting.
        wanted: whether a value may help.
        tried: values that were.
        space: values of each setting; where it has such values, the advice is to let the search come to them.
        offer: the advice where it has none.
        why: how either sentence ends.
    """
    if any(wanted(value) for value in tried):
        return
    if waiting := [value_text(name, value) for value in space.get(name, ()) if wanted(value)]:
        offer = f"Try {NAMES[name]} {' or '.join(waiting)}, which the space has and no trial measured ({_GO_ON})"
    yield f"{offer}{why}."


def _not_ruled_out(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if not trial.is_ruled_out]


def _is_on(value: Value) -> bool:
    return value is True


def _is_bf16(value: Value) -> bool:
    return value == "bf16"


def _larger(left: object, right: object) -> bool:
    return isinstance(left, int) and isinstance(right, int) and left > right
