"""The configurations that a throughput search may take, and which of them need at least the memory of others."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.placement import NodeResources, place_workers
from common.errors import ConfigError, ResourceError
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, BatchSection, Config, DataSection, RaySection
from train_config.tune_schema import TuneConfig
from tuning.settings import NAMES, Settings, Value

ORDERED = frozenset({"tokens", "batch_size", "num_workers", "prefetch", "stage", "workers"})
"""Settings whose values have neighbours."""


@dataclass(frozen=True)
class SearchSpace:
    """Every valid configuration.

    Attributes:
        values: of each setting, those that a configuration has, ascending where they are ordered.
        settings: the configurations, those that need the least memory first.
        left_out: combinations that can't be or make no difference, counted by reason.
        default: the experiment's own configuration, or the one most like it.
    """

    values: Mapping[str, tuple[Value, ...]]
    settings: tuple[Settings, ...]
    left_out: Mapping[str, int]
    default: Settings

    def __len__(self) -> int:
        return len(self.settings)

    @property
    def varied(self) -> list[str]:
        """Settings that have more than one value."""
        return [name for name in NAMES if len(self.values[name]) > 1]

    @property
    def budgets(self) -> list[int]:
        """Token budgets, ascending."""
        return sorted({settings.tokens for settings in self.settings})

    def ladder(self, settings: Settings) -> list[Settings]:
        """``settings`` with every token budget that is valid with its other settings, ascending."""
        alike = [other for other in self.settings if replace(other, tokens=settings.tokens) == settings]
        return sorted(alike, key=lambda other: other.tokens)

    def steps(self, settings: Settings) -> Iterator[Settings]:
        """``settings`` with the value next to its own, or another value of an unordered setting, for each setting."""
        for name in self.varied:
            values, own = self.values[name], self.values[name].index(getattr(settings, name))
            for place, value in enumerate(values):
                if name not in ORDERED or abs(place - own) == 1:
                    yield replace(settings, **{name: value})  # type: ignore[arg-type]

    def nearest(self, settings: Settings, among: Sequence[Settings] = ()) -> Settings:
        """The configuration most like this one, among all or those given."""
        return min(among or self.settings, key=lambda other: self._distance(settings, other))

    def _distance(self, wanted: Settings, other: Settings) -> tuple[int, float, float]:
        """Settings that differ beside the budget, by how many places, then how far the budget is."""
        differing = [n for n in NAMES if n != "tokens" and getattr(wanted, n) != getattr(other, n)]
        places = sum(_places(n, getattr(wanted, n), getattr(other, n)) for n in differing)
        above = 0.01 * (other.tokens > wanted.tokens)
        return len(differing), places, abs(math.log2(other.tokens / wanted.tokens)) + above


def make_space(config: Config, search: TuneConfig, nodes: list[NodeResources]) -> SearchSpace:
    """Every configuration that the experiment can have with the values of ``search.space`` on these machines.

    Raises ConfigError where no combination is left, ResourceError where the cluster can't hold the experiment's own
    workers.
    """
    placed = place_workers(config.ray, nodes)
    own = Settings.of(config, placed.count, placed.device)
    values = {name: _sorted(name, getattr(search.space, name) or [getattr(own, name)]) for name in NAMES}
    if search.space.tokens is None:
        values["tokens"] = _budgets(config.data, config.batch, own.tokens)
    refusal = _refusals(config, search, nodes, placed.device, values)
    valid: list[Settings] = []
    left_out: Counter[str] = Counter()
    for combination in itertools.product(*values.values()):
        settings = Settings(**dict(zip(values, combination, strict=True)))  # type: ignore[arg-type]
        if reason := refusal(settings):
            left_out[reason] += 1
        else:
            valid.append(settings)
    if not valid:
        reasons = "; ".join(f"{count} because of {reason}" for reason, count in left_out.items())
        raise ConfigError(f"space: no configuration is left of {left_out.total()}: {reasons}")
    ordered = tuple(sorted(valid, key=_memory_order))
    occurring = {name: tuple(v for v in values[name] if any(getattr(s, name) == v for s in valid)) for name in NAMES}
    space = SearchSpace(occurring, ordered, dict(left_out), valid[0])
    return replace(space, default=space.nearest(own))


_RECOMPUTED: list[bool | str] = [False, "selective", True]
"""Values of gradient_checkpointing; each needs less memory than the one before."""


def needs_at_least(more: Settings, less: Settings) -> bool:
    """Return whether ``more`` surely needs at least the memory of a device that ``less`` needs.

    Nothing is concluded from another ZeRO stage or from compiling, whose buffers may weigh either way, nor from another
    number of workers, which share a machine's memory on the CPU. Loading does not matter to the device.
    """
    return (
        (more.compile, more.stage, more.workers) == (less.compile, less.stage, less.workers)
        and more.tokens >= less.tokens
        and (more.batch_size or math.inf) >= (less.batch_size or math.inf)
        and _RECOMPUTED.index(more.gradient_checkpointing) <= _RECOMPUTED.index(less.gradient_checkpointing)
        and (more.precision == less.precision or more.precision == "fp32")
    )


def _refusals(
    config: Config, search: TuneConfig, nodes: list[NodeResources], device: str, values: Mapping[str, Sequence[Any]]
) -> Callable[[Settings], str | None]:
    """A function that says why a configuration is left out: it is not possible, or makes no difference."""
    needed = config.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    placeable = [count for count in values["workers"] if _can_place(config.ray, nodes, count)]
    global_tokens = config.batch.global_tokens if search.keep_global_tokens else 0
    prefetch = config.data.prefetch if config.data.prefetch in values["prefetch"] else values["prefetch"][0]
    nothing_to_recompute = config.model.backbone.frozen and len(values["gradient_checkpointing"]) > 1

    def refusal(settings: Settings) -> str | None:
        if settings.tokens < needed:
            return f"a budget under the {needed} tokens of the longest sequence"
        if settings.workers not in placeable:
            return "more workers than the cluster holds"
        if global_tokens % (settings.tokens * settings.workers):
            return f"budgets, times workers, that do not divide the {global_tokens} tokens of the global batch"
        if settings.precision == "fp16" and device == "cpu":
            return "fp16, which needs a GPU"
        if settings.stage == 0 and config.deepspeed.offload_optimizer:
            return "deepspeed.offload_optimizer, which needs ZeRO stage 1 to 3"
        if settings.num_workers == 0 and settings.prefetch != prefetch:
            return "prefetching, which makes no difference without loader processes"
        if settings.gradient_checkpointing and nothing_to_recompute:
            return "checkpointing, which makes no difference to a frozen backbone"
        return None

    return refusal


def _budgets(data: DataSection, batch: BatchSection, own: int) -> tuple[int, ...]:
    """Powers of two that hold the longest sequence, up to the global batch, and the experiment's own budget."""
    smallest = data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    exponents = range(math.ceil(math.log2(smallest)), int(math.log2(batch.global_tokens)) + 1)
    return tuple(sorted({own, *(2**exponent for exponent in exponents)}))


def _can_place(ray: RaySection, nodes: list[NodeResources], count: int) -> bool:
    try:
        place_workers(ray.model_copy(update={"num_workers": count}), nodes)
    except ResourceError:
        return False
    return True


def _sorted(name: str, values: list[Any]) -> tuple[Value, ...]:
    return tuple(sorted(values)) if name in ORDERED and None not in values else tuple(values)


def _places(name: str, one: Any, other: Any) -> float:
    return abs(one - other) if name in ORDERED and None not in (one, other) else 1.0


def _memory_order(settings: Settings) -> tuple[Any, ...]:
    """Ascending by what needs memory. Worker groups follow one another; the rest makes the order unique."""
    return (
        -settings.workers,
        settings.tokens,
        -_RECOMPUTED.index(settings.gradient_checkpointing),
        settings.precision == "fp32",
        -settings.stage,
        tuple(str(getattr(settings, name)) for name in NAMES),
    )
