"""The configurations that a throughput search may take, and which of them need at least the memory of others."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from esmeray.cluster.placement import NodeResources, Workers, place_workers
from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE, DataSection
from esmeray.tuning.records import NAMES, Job, Settings, Value, value_text
from esmeray.tuning.section import SearchSection, TuneConfig

ORDERED = frozenset({"tokens", "batch_size", "num_workers", "prefetch", "stage", "workers"})
"""Settings whose values have neighbours."""

LEAST_TRIALS = 12


@dataclass(frozen=True)
class SearchSpace:
    """Every valid configuration (``settings``), and the values of each setting, ascending where they are ordered.

    ``left_out`` counts combinations that can't be or make no difference by reason, ``default`` is the experiment's own
    configuration or the one most like it, ``workers`` are those of a trial by their number.
    """

    values: Mapping[str, tuple[Value, ...]]
    settings: tuple[Settings, ...]
    left_out: Mapping[str, int]
    default: Settings
    workers: Mapping[int, Workers]

    def __len__(self) -> int:
        return len(self.settings)

    @property
    def varied(self) -> list[str]:
        return [name for name in NAMES if len(self.values[name]) > 1]

    @property
    def budgets(self) -> list[int]:
        return sorted({settings.tokens for settings in self.settings})

    def ladder(self, settings: Settings) -> list[Settings]:
        """``settings`` with every token budget that is valid with its other settings, ascending."""
        alike = [other for other in self.settings if replace(other, tokens=settings.tokens) == settings]
        return sorted(alike, key=lambda other: other.tokens)

    def nearest(self, settings: Settings, among: Sequence[Settings] = ()) -> Settings:
        """The configuration most like this one."""
        return min(among or self.settings, key=lambda other: self._distance(settings, other))

    def _distance(self, wanted: Settings, other: Settings) -> tuple[int, float, float]:
        """Settings that differ beside the budget, by how much, then how far the budget is."""
        differing = [n for n in NAMES if n != "tokens" and getattr(wanted, n) != getattr(other, n)]
        steps = sum(_steps_between(n, getattr(wanted, n), getattr(other, n)) for n in differing)
        # Of two budgets that are as far the smaller, which is less likely to run out of memory.
        above = 0.01 * (other.tokens > wanted.tokens)
        return len(differing), steps, abs(math.log2(other.tokens / wanted.tokens)) + above


def make_space(job: Job, nodes: list[NodeResources], data_tokens: int | None = None) -> SearchSpace:
    """Every configuration that the experiment can have with the values of ``search.space`` on these machines.

    ``data_tokens`` are those of all training sequences, where known. Raises ConfigError where no combination is left,
    ResourceError where the cluster can't hold the experiment's own workers.
    """
    config, search = job.config, job.search
    placed = place_workers(config.ray, nodes)
    own = job.own_settings(placed)
    values = {name: tuple(getattr(search.space, name) or [getattr(own, name)]) for name in NAMES}
    values |= {name: tuple(sorted(values[name])) for name in ORDERED if None not in values[name]}
    if search.space.tokens is None:
        largest = config.batch.global_tokens
        if data_tokens is not None and not search.keep_global_tokens:
            largest = -(-data_tokens // placed.count)  # a worker's share of them fills no larger batch
        # Where budgets alone are searched there is time for more of them: the best lies between two powers of two.
        alone = all(len(values[name]) == 1 for name in NAMES)
        values["tokens"] = _budgets(config.data, own.tokens, largest, steps=4 if alone else 1)
    workers = _workers(config.ray, nodes, values["workers"])
    valid: list[Settings] = []
    left_out: Counter[str] = Counter()
    for combination in itertools.product(*values.values()):
        settings = Settings(**dict(zip(values, combination, strict=True)))  # type: ignore[arg-type]
        if reason := _refusal(settings, job, workers, values):
            left_out[reason] += 1
        else:
            valid.append(settings)
    if not valid:
        reasons = "; ".join(f"{count} because of {reason}" for reason, count in left_out.items())
        raise ConfigError(f"space: no configuration is left of {left_out.total()}: {reasons}")
    # Values that no valid configuration has are no choice: a sampler would ask for them in vain.
    occurring = {name: tuple(v for v in values[name] if any(getattr(s, name) == v for s in valid)) for name in NAMES}
    space = SearchSpace(occurring, tuple(valid), dict(left_out), valid[0], workers)
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


def most_trials(search: SearchSection, size: int) -> int:
    """The number of configurations to measure of a space of this size."""
    if search.max_trials is not None:
        return min(search.max_trials, size)
    return size if search.algorithm == "grid" else min(size, max(LEAST_TRIALS, size // 5))


def _refusal(
    settings: Settings, job: Job, workers: Mapping[int, Workers], values: Mapping[str, Sequence[Any]]
) -> str | None:
    """Why a configuration is left out, of those that have these values; None where it is valid."""
    config = job.config
    needed = config.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    if settings.tokens < needed:
        return f"a budget under the {needed} tokens of the longest sequence"
    if settings.workers not in workers:
        return "more workers than the cluster holds"
    global_tokens = config.batch.global_tokens
    if job.search.keep_global_tokens and global_tokens % (settings.tokens * settings.workers):
        return f"budgets, times workers, that do not divide the {global_tokens} tokens of the global batch"
    if settings.precision == "fp16" and workers[settings.workers].device == "cpu":
        return "fp16, which needs a GPU"
    if settings.stage == 0 and config.deepspeed.offload_optimizer:
        return "deepspeed.offload_optimizer, which needs ZeRO stage 1 to 3"
    # What makes no difference is measured with one of its values: the experiment's own, where that is offered.
    prefetch = config.data.prefetch if config.data.prefetch in values["prefetch"] else values["prefetch"][0]
    if settings.num_workers == 0 and settings.prefetch != prefetch:
        return "prefetching, which makes no difference without loader processes"
    offers_both = len(values["gradient_checkpointing"]) > 1
    is_idle = settings.gradient_checkpointing and config.model.backbone.frozen and offers_both
    return "checkpointing, which makes no difference to a frozen backbone" if is_idle else None


def _budgets(data: DataSection, own: int, largest: int, steps: int) -> tuple[int, ...]:
    """The experiment's own budget, and powers of two from the one that holds the longest sequence to the largest.

    ``steps`` are the budgets of each doubling.
    """
    smallest = data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    # The step below the smallest power of two may hold budgets of a doubling that do fit the longest sequence.
    exponents = range(int(math.log2(smallest)), int(math.log2(max(smallest, largest))) + 1)
    budgets = {2**exponent * (steps + step) // steps for exponent in exponents for step in range(steps)}
    return tuple(sorted({own} | {tokens for tokens in budgets if smallest <= tokens <= largest}))


def _workers(ray: RaySection, nodes: list[NodeResources], counts: Sequence[Any]) -> dict[int, Workers]:
    """The workers of a trial for each count that the cluster holds.

    With GPUs, each has a device's share of its machine's cores, so that trials side by side find room. Without, those
    of a trial take the machine: beside another one they would be measured too slow.
    """
    if ray.cpus_per_worker == "auto" and any(node.gpus for node in nodes):
        share = min(node.cpus // node.gpus for node in nodes if node.gpus)
        ray = ray.model_copy(update={"cpus_per_worker": max(1, share)})
    workers = {}
    for count in counts:
        # A count that the cluster can't hold is left out with a reason, not refused: the others are searched.
        with suppress(ResourceError):
            workers[count] = place_workers(ray.model_copy(update={"num_workers": count}), nodes)
    return workers


def _steps_between(name: str, value: Any, other: Any) -> float:
    return abs(value - other) if name in ORDERED and None not in (value, other) else 1.0


def space_lines(space: SearchSpace, search: TuneConfig) -> list[str]:
    words = {name: [value_text(name, value) for value in space.values[name]] for name in space.varied}
    lines = [f"{NAMES[name]:<21} {', '.join(values)}" for name, values in words.items()]
    lines.append(f"{'configurations':<21} {len(space):,}")
    lines += [f"{'left out':<21} {count:,}: {reason}" for reason, count in space.left_out.items()]
    trials = most_trials(search.search, len(space))
    budget_s = search.search.time_budget_s
    until = f", and none after {budget_s:g} s" if budget_s is not None else ""
    lines.append(f"{'trials':<21} at most {trials:,} ({search.search.algorithm}){until}")
    return lines
