"""The configurations of a throughput search, and comparisons of their memory use."""

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

MIN_TRIALS = 12


@dataclass(frozen=True)
class SearchSpace:
    """All valid configurations (``settings``), and the values of each setting, ascending if they are ordered.

    - ``left_out``: number of combinations that are impossible or make no difference, by reason.
    - ``default``: the experiment's own configuration, or the nearest valid one.
    - ``workers``: workers of a trial by their number.
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

    def ladder(self, settings: Settings) -> list[Settings]:
        """Return ``settings`` with every token budget that is valid with its other settings, ascending."""
        alike = [other for other in self.settings if replace(other, tokens=settings.tokens) == settings]
        return sorted(alike, key=lambda other: other.tokens)

    def nearest(self, settings: Settings, among: Sequence[Settings] = ()) -> Settings:
        """Return the configuration most similar to this one."""
        return min(among or self.settings, key=lambda other: self._distance(settings, other))

    def _distance(self, wanted: Settings, other: Settings) -> tuple[float, int]:
        """Return the number of differing settings, where a doubling of the budget counts as one; then the budget."""
        differing = [n for n in NAMES if n != "tokens" and getattr(wanted, n) != getattr(other, n)]
        # Of two equally distant budgets the smaller is nearer: it is less likely to run out of memory.
        return len(differing) + abs(math.log2(other.tokens / wanted.tokens)), other.tokens


def make_space(job: Job, nodes: list[NodeResources], data_tokens: int | None = None) -> SearchSpace:
    """Return all configurations of the experiment with the values of ``search.space`` on these machines.

    ``data_tokens``: tokens of all training sequences, if known. Raises ConfigError if no combination is left, and
    ResourceError if the cluster can't hold the experiment's own workers.
    """
    config, search = job.config, job.search
    placed = place_workers(config.ray, nodes)
    own = job.own_settings(placed)
    values = {name: tuple(getattr(search.space, name) or [getattr(own, name)]) for name in NAMES}
    for name in values.keys() - {"precision"}:
        if None not in values[name]:
            values[name] = tuple(sorted(values[name]))
    if search.space.tokens is None:
        largest = config.batch.global_tokens
        if data_tokens is not None and not search.keep_global_tokens:
            largest = -(-data_tokens // placed.count)  # a worker's share of the data fills no larger batch
        # A search over budgets alone has time for more of them: the best is between two powers of two.
        alone = all(len(values[name]) == 1 for name in NAMES)
        values["tokens"] = _budgets(config.data, own.tokens, largest, steps=4 if alone else 1)
    workers = _workers(config.ray, nodes, values["workers"])
    valid: list[Settings] = []
    left_out: Counter[str] = Counter()
    for combination in itertools.product(*values.values()):
        settings = Settings(**dict(zip(values, combination, strict=True)))  # type: ignore[arg-type]
        if reason := _refusal(settings, job, workers):
            left_out[reason] += 1
        else:
            valid.append(settings)
    if not valid:
        reasons = "; ".join(f"{count} excluded for {reason}" for reason, count in left_out.items())
        raise ConfigError(f"space: none of {left_out.total()} configurations is valid: {reasons}")
    # Values without a valid configuration are removed: a sampler would suggest them in vain.
    occurring = {}
    for name in NAMES:
        used = {getattr(settings, name) for settings in valid}
        occurring[name] = tuple(value for value in values[name] if value in used)
    space = SearchSpace(occurring, tuple(valid), dict(left_out), valid[0], workers)
    return replace(space, default=space.nearest(own))


def needs_at_least(more: Settings, less: Settings) -> bool:
    """Return whether ``more`` surely needs at least the device memory that ``less`` needs.

    Nothing is concluded from a different number of workers, which share a machine's memory on the CPU. Loading does not
    affect the device.
    """
    return (
        more.workers == less.workers
        and more.tokens >= less.tokens
        and (more.batch_size or math.inf) >= (less.batch_size or math.inf)
        and (more.precision == less.precision or more.precision == "fp32")
    )


def most_trials(search: SearchSection, size: int) -> int:
    """Return the number of configurations to measure in a space of this size."""
    return min(size, search.max_trials or max(MIN_TRIALS, size // 3))


def _refusal(settings: Settings, job: Job, workers: Mapping[int, Workers]) -> str | None:
    """Return the reason for leaving a configuration out of a space; None if it is valid."""
    config = job.config
    needed = config.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    global_tokens = config.batch.global_tokens
    divides = global_tokens % (settings.tokens * settings.workers) == 0
    refusals = {
        f"a budget below the longest sequence ({needed} tokens)": settings.tokens < needed,
        "more workers than the cluster can run": settings.workers not in workers,
        f"budgets times workers that do not divide batch.global_tokens ({global_tokens})": (
            job.search.keep_global_tokens and not divides
        ),
        "fp16, which needs a GPU": settings.precision == "fp16"
        and not any(placed.use_gpu for placed in workers.values()),
    }
    return next((reason for reason, applies in refusals.items() if applies), None)


def _budgets(data: DataSection, own: int, largest: int, steps: int) -> tuple[int, ...]:
    """Return the experiment's own budget, and powers of two from the longest sequence to the largest budget.

    ``steps``: number of budgets per doubling.
    """
    smallest = data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
    # Start at the power of two below the longest sequence: intermediate budgets of that doubling may still hold it.
    exponents = range(int(math.log2(smallest)), int(math.log2(max(smallest, largest))) + 1)
    budgets = {2**exponent * (steps + step) // steps for exponent in exponents for step in range(steps)}
    allowed = {tokens for tokens in budgets if smallest <= tokens <= largest}
    return tuple(sorted({own, *allowed}))


def _workers(ray: RaySection, nodes: list[NodeResources], counts: Sequence[Any]) -> dict[int, Workers]:
    """Return the workers of a trial for each count that the cluster can hold.

    With GPUs, each worker gets a device's share of its machine's cores, so that concurrent trials fit. Without GPUs, a
    trial's workers use the whole machine, since concurrent trials would slow each other down.
    """
    if ray.cpus_per_worker == "auto" and any(node.gpus for node in nodes):
        share = min(node.cpus // node.gpus for node in nodes if node.gpus)
        ray = ray.model_copy(update={"cpus_per_worker": max(1, share)})
    workers = {}
    for count in counts:
        # A count that the cluster can't hold is left out with a reason, and the others are searched.
        with suppress(ResourceError):
            workers[count] = place_workers(ray.model_copy(update={"num_workers": count}), nodes)
    return workers


def space_lines(space: SearchSpace, search: TuneConfig) -> list[str]:
    words = {name: [value_text(value) for value in space.values[name]] for name in space.varied}
    lines = [f"{NAMES[name]:<21} {', '.join(values)}" for name, values in words.items()]
    lines.append(f"{'configurations':<21} {len(space):,}")
    lines += [f"{'left out':<21} {count:,}: {reason}" for reason, count in space.left_out.items()]
    trials = most_trials(search.search, len(space))
    budget_s = search.search.time_budget_s
    until = f", for at most {budget_s:g} s" if budget_s is not None else ""
    lines.append(f"{'trials':<21} at most {trials:,}{until}")
    return lines
