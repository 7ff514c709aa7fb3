"""The configurations that a throughput search may take: values of each setting, without the combinations that can't be.

In: an experiment, the settings of a search, what the machines have. Out: :class:`SearchSpace`, every valid
configuration, the experiment's own, and how many combinations were left out and why. Also which
configuration needs at least as much memory as another, from which a search concludes without measuring.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from common.errors import ConfigError, ResourceError
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, Config
from train_config.tune_schema import TuneConfig
from training.launch.placement import NodeResources, place_workers
from tuning.settings import Settings, Value

CHECKPOINTING = "gradient_checkpointing"
NAMES = (
    "tokens",
    "workers",
    "amp_dtype",
    "num_workers",
    "compile",
    "batch_size",
    "stage",
    "prefetch",
    CHECKPOINTING,
)
"""The settings, those first that usually decide most."""

ORDERED = frozenset({"tokens", "batch_size", "num_workers", "prefetch", "stage", "workers"})
"""Settings whose values have neighbours."""


@dataclass(frozen=True)
class SearchSpace:
    """Every valid configuration.

    Attributes:
        values: of each setting of :data:`NAMES`, those that a configuration has, ascending where they are numbers.
        settings: the configurations, those that need the least memory first.
        left_out: combinations that can't be or make no difference, counted by reason.
        default: the experiment's own configuration, or the one most like it.
        shares_memory: whether a worker may take its part of a machine's memory, which is larger where there are fewer:
            so on the CPU, unless ``training.cpu_memory_limit_mib`` says what one may take.
    """

    values: Mapping[str, tuple[Value, ...]]
    settings: tuple[Settings, ...]
    left_out: Mapping[str, int]
    default: Settings
    shares_memory: bool = False

    def __len__(self) -> int:
        return len(self.settings)

    def __contains__(self, settings: object) -> bool:
        return settings in self._members

    @cached_property
    def _members(self) -> frozenset[Settings]:
        return frozenset(self.settings)

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
        return sorted((s for s in self.settings if replace(s, tokens=settings.tokens) == settings), key=_tokens)

    def steps(self, settings: Settings) -> Iterator[Settings]:
        """Return ``settings`` with the value next to its own, of an unordered setting any other, for each setting."""
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
        differing = [n for n in NAMES if n not in ("tokens",) and getattr(wanted, n) != getattr(other, n)]
        places = sum(_places(n, getattr(wanted, n), getattr(other, n)) for n in differing)
        above = 0.01 * (other.tokens > wanted.tokens)
        return len(differing), places, abs(math.log2(other.tokens / wanted.tokens)) + above


def make_space(config: Config, search: TuneConfig, nodes: list[NodeResources]) -> SearchSpace:
    """Every configuration that the experiment can have with the values of ``search.space``.

    Args:
        config: the experiment, whose values are kept where the search names none.
        search: values, and whether the global batch is kept.
        nodes: what each machine has.

    Raises:
        ConfigError: no combination is left; says why they were left out.
        ResourceError: the cluster can't hold the experiment's own workers.
    """
    placed = place_workers(config.ray, nodes)
    own = Settings.of(config, placed.count)
    values = {name: _sorted(name, getattr(search.space, name) or [getattr(own, name)]) for name in NAMES}
    if search.space.tokens is None:
        values["tokens"] = _budgets(config, own.tokens)
    rules = _Rules(config, search, nodes, placed.device, values)
    valid: list[Settings] = []
    left_out: Counter[str] = Counter()
    for combination in itertools.product(*values.values()):
        settings = Settings(**dict(zip(values, combination, strict=True)))  # type: ignore[arg-type]
        if reason := rules.refusal(settings):
            left_out[reason] += 1
        else:
            valid.append(settings)
    if not valid:
        reasons = "; ".join(f"{count} because of {reason}" for reason, count in left_out.items())
        raise ConfigError(f"space: no configuration is left of {left_out.total()}: {reasons}")
    shares_memory = placed.device == "cpu" and config.training.cpu_memory_limit_mib is None
    ordered = tuple(sorted(valid, key=_memory_order))
    occurring = {name: tuple(v for v in values[name] if any(getattr(s, name) == v for s in valid)) for name in NAMES}
    space = SearchSpace(occurring, ordered, dict(left_out), valid[0], shares_memory)
    return replace(space, default=space.nearest(own))


def needs_at_least(more: Settings, less: Settings) -> bool:
    """Return whether ``more`` surely needs at least the memory of a device that ``less`` needs.

    Budget and sequences may be larger, activations kept in place of recomputed, fp32 in place of 16 bits, and ZeRO's
    state spread over fewer workers; how batches are loaded does not matter to the device. Nothing is concluded from
    another stage or from compiling, whose buffers may weigh either way.
    """
    if (more.compile, more.stage) != (less.compile, less.stage):
        return False
    return (
        more.tokens >= less.tokens
        and (more.batch_size or math.inf) >= (less.batch_size or math.inf)
        and more.gradient_checkpointing <= less.gradient_checkpointing
        and (more.amp_dtype == less.amp_dtype or more.amp_dtype == "none")
        and (more.workers <= less.workers or more.stage == 0)
    )


class _Rules:
    """Reasons to leave a combination out: it is not possible, or makes no difference."""

    def __init__(
        self,
        config: Config,
        search: TuneConfig,
        nodes: list[NodeResources],
        device: str,
        values: Mapping[str, tuple[Value, ...]],
    ) -> None:
        self._config, self._device = config, device
        self._global_tokens = config.batch.global_tokens if search.keep_global_tokens else None
        counts = range(1, max(values["workers"]) + 1)  # type: ignore[operator, type-var]
        self._most_workers = len(list(itertools.takewhile(lambda count: _can_place(config, nodes, count), counts)))
        self._prefetch = config.data.prefetch if config.data.prefetch in values["prefetch"] else values["prefetch"][0]
        backbone = config.model.backbone
        self._nothing_to_recompute = backbone.frozen and len(values["gradient_checkpointing"]) > 1

    def refusal(self, settings: Settings) -> str | None:
        """Why a configuration is left out; None if it is not."""
        needed = self._config.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
        if settings.tokens < needed:
            return f"a budget under the {needed} tokens of the longest sequence"
        if settings.workers > self._most_workers:  # type: ignore[operator]
            return f"more workers than the {self._most_workers} that the cluster holds"
        if self._global_tokens and self._global_tokens % (settings.tokens * settings.workers):
            return f"budgets, times workers, that do not divide the {self._global_tokens} tokens of the global batch"
        if settings.amp_dtype == "fp16" and self._device == "cpu":
            return "fp16, which needs a GPU"
        if settings.stage == 0 and self._config.deepspeed.offload_optimizer:
            return "deepspeed.offload_optimizer, which needs ZeRO stage 1 to 3"
        if settings.num_workers == 0 and settings.prefetch != self._prefetch:
            return "prefetching, which makes no difference without loader processes"
        if settings.gradient_checkpointing and self._nothing_to_recompute:
            return "checkpointing, which makes no difference to a frozen backbone"
        return None


def _budgets(config: Config, own: int) -> tuple[int, ...]:
    """Powers of two that hold the longest sequence, up to the global batch, and the experiment's own budget."""
    smallest = config.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    exponents = range(math.ceil(math.log2(smallest)), int(math.log2(config.batch.global_tokens)) + 1)
    return tuple(sorted({own, *(2**exponent for exponent in exponents)}))


def _can_place(config: Config, nodes: list[NodeResources], count: int) -> bool:
    try:
        place_workers(config.ray.model_copy(update={"num_workers": count}), nodes)
    except ResourceError:
        return False
    return True


def _sorted(name: str, values: list[Any]) -> tuple[Value, ...]:
    return tuple(sorted(values)) if name in ORDERED and None not in values else tuple(values)


def _places(name: str, one: Any, other: Any) -> float:
    return abs(one - other) if name in ORDERED and None not in (one, other) else 1.0


def _tokens(settings: Settings) -> int:
    return settings.tokens


def _memory_order(settings: Settings) -> tuple[Any, ...]:
    """Ascending by what needs memory; the rest only for the sake of one order. Worker groups follow one another."""
    values = asdict(settings)
    return (
        -settings.workers,
        settings.tokens,
        not settings.gradient_checkpointing,
        settings.amp_dtype == "none",
        -settings.stage,
        tuple(str(values[name]) for name in NAMES),
    )
