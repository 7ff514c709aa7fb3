"""Advice from measured facts: :data:`RULES` name what limits a run and which settings to change."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Facts:
    """Measurements and settings; a setting that is None is unknown.

    Attributes:
        shares: measurements by name, between 0 and 1; None and missing ones are unknown:

            - data_wait, forward, backward, communication, optimizer, checkpoint: shares of a step's time
            - utilisation, idle: mean GPU utilisation from first to last work, and share of that time without work
            - power: share of the power limit while busy
            - thermal, power_capped: shares of the busy time with clocks lowered for heat, or for power
            - model_waits, attention: shares of an embedding job's time in which the device is idle, or in attention
            - products_of_peak: FLOP/s of matrix products as a share of the device's peak
            - memory: peak share of the memory
        precision, gradient_checkpointing, compile, stage, workers: values in the config.
        tried: settings whose other values were measured; no action offers them again.
    """

    shares: Mapping[str, float | None]
    precision: str | None = None
    gradient_checkpointing: bool | None = None
    compile: bool | None = None
    stage: int | None = None
    workers: int | None = None
    tried: frozenset[str] = frozenset()


class Action(NamedTuple):
    """A recommended change. ``key``: the setting to change, empty if it is not a setting."""

    key: str
    text: str
    helps: Callable[[Facts], bool] = lambda facts: True


class Advice(NamedTuple):
    """A finding with its number, its topic in :data:`RULES`, and actions, the cheapest first.

    ``cost``: estimated share of the time lost; orders the advice.
    """

    topic: str
    finding: str
    actions: tuple[Action, ...] = ()
    cost: float = 0.0

    def __str__(self) -> str:
        actions = "; ".join(action.text for action in self.actions)
        return f"{self.finding}: {actions}" if actions else self.finding


class Rule(NamedTuple):
    """Shares, whose sum is reported within a range; the cost is ``weight`` times the share that is lost.

    If the first of the shares is unknown, so is the sum.
    """

    shares: tuple[str, ...]
    finding: str
    actions: tuple[Action, ...]
    least: float = 0.0
    below: float = math.inf
    weight: float = 1.0
    applies: Callable[[Facts], bool] = lambda facts: True


def advise(facts: Facts) -> list[Advice]:
    """Return findings, the costliest first; if nothing is lost, the speed limit comes last."""
    return sorted(_by_rule(facts), key=lambda advice: -advice.cost)


def limiting_factor(facts: Facts) -> Advice | None:
    """Return the finding on what limits the speed of a step: loading, communication or compute."""
    by_topic = {advice.topic: advice for advice in _by_rule(facts)}
    # Waits are fixed first: more compute would only wait longer.
    order = ("loading", "communication", "compute")
    return next((by_topic[topic] for topic in order if topic in by_topic), None)


def _by_rule(facts: Facts) -> Iterator[Advice]:
    known = {name: share for name, share in facts.shares.items() if share is not None}
    for topic, rule in RULES.items():
        value = sum(known.get(name, 0.0) for name in rule.shares)
        if rule.shares[0] in known and rule.least <= value < rule.below and rule.applies(facts):
            # Without this wait a step takes 1 - value of its time: an upper bound of the gain.
            finding = rule.finding.format(value, gain=value / max(1 - value, 0.01))
            # A search that measured the setting's other values found the current one the fastest.
            actions = tuple(a for a in rule.actions if a.key not in facts.tried and a.helps(facts))
            # Rules with an upper bound report a value that is too low: the loss is the difference to 1.
            yield Advice(topic, finding, actions, rule.weight * (value if math.isinf(rule.below) else 1 - value))


_CHECKPOINTING = "model.backbone.gradient_checkpointing"
# Offered if the config has the other value, not if it is unknown: a GPU log has no config.
_BF16 = Action(
    "training.precision",
    # The log may be read on another machine, so the run's hardware is unknown here.
    "set training.precision: bf16 if the GPU or processor supports it",
    lambda facts: facts.precision == "fp32",
)
_COMPILE = Action("training.compile", "set training.compile: true on a GPU", lambda facts: facts.compile is False)
_GLOBAL_TOKENS = Action("batch.global_tokens", "raise batch.global_tokens (this changes the training)")
_MORE_TOKENS = Action("batch.tokens", "raise batch.tokens (`esmeray tune tokens` finds the fastest)")
# In order of cost: bf16 is free, checkpointing adds a forward pass, ZeRO stages add traffic, offloading costs most.
_SAVE_MEMORY = (
    _BF16,
    Action(_CHECKPOINTING, f"set {_CHECKPOINTING}: true", lambda facts: facts.gradient_checkpointing is not True),
    Action("deepspeed.stage", "raise deepspeed.stage", lambda f: (f.workers or 0) > 1 and (f.stage or 0) < 3),
    Action("deepspeed.offload_optimizer", "set deepspeed.offload_optimizer: true, or use a device with more memory"),
)

RULES = {
    "loading": Rule(
        ("data_wait",),
        "Loading is the bottleneck: {:.0%} of a step is spent waiting for batches; without the waits, steps would "
        "be up to {gain:.0%} faster",
        (
            Action("data.num_workers", "raise data.num_workers while cores are free"),
            Action("data.stage_dir", "keep the store on a local disk (data.stage_dir)"),
        ),
        least=0.08,
        # If one worker waits for its batch, the others wait for it in communication: the larger of the two is reported.
        applies=lambda facts: (facts.shares.get("data_wait") or 0.0) >= (facts.shares.get("communication") or 0.0),
    ),
    "communication": Rule(
        ("communication",),
        "Communication is the bottleneck: {:.0%} of a step is spent exchanging gradients and waiting for the "
        "slowest worker",
        (
            _GLOBAL_TOKENS,
            Action("deepspeed.stage", "lower deepspeed.stage if memory allows it", lambda facts: bool(facts.stage)),
            Action("ray.num_workers", "compare with fewer workers (ray.num_workers)", lambda f: (f.workers or 0) > 1),
            Action("", "check the network between the workers and what else uses their cores"),
        ),
        least=0.15,
    ),
    "checkpoints": Rule(
        ("checkpoint",),
        "{:.0%} of a step is spent writing checkpoints",
        (Action("checkpoint.every_steps", "raise checkpoint.every_steps"),),
        least=0.05,
    ),
    "update": Rule(("optimizer",), "The optimizer's update takes {:.0%} of a step", (_GLOBAL_TOKENS,), least=0.15),
    "compute": Rule(
        ("forward", "backward", "optimizer"),
        "Compute is the bottleneck: {:.0%} of a step is spent in the model's forward and backward pass",
        (
            _BF16,
            Action(_CHECKPOINTING, f"set {_CHECKPOINTING}: false", lambda facts: facts.gradient_checkpointing is True),
            _COMPILE,
            Action("ray.num_workers", "use more devices (ray.num_workers), a faster device or a smaller backbone"),
        ),
        weight=0.0,  # not a loss: this line comes last
    ),
    "idle": Rule(
        ("idle",),
        "The GPU is idle for {:.0%} of the run",
        (Action("", "see data_wait_s, communication_s and checkpoint_s in metrics.jsonl for the cause"),),
        least=0.05,
    ),
    "utilisation": Rule(("utilisation",), "GPU utilisation is {:.0%}", (_MORE_TOKENS, _COMPILE), below=0.7),
    "light load": Rule(
        ("power",),
        "The GPU draws only {:.0%} of its power limit while busy: most of the chip is idle",
        (_MORE_TOKENS, _BF16),
        below=0.4,
        weight=0.0,
        applies=lambda facts: (facts.shares.get("utilisation") or 0.0) >= 0.7,
    ),
    "memory full": Rule(
        ("memory",),
        "Peak memory is {:.0%}, so a longer batch may run out of memory",
        (Action("batch.tokens", "lower batch.tokens by a tenth"), *_SAVE_MEMORY),
        least=0.95,
        weight=0.0,  # a risk, no lost time
    ),
    "memory unused": Rule(("memory",), "Peak memory is {:.0%}", (_MORE_TOKENS,), below=0.6, weight=0.0),
    "heat": Rule(
        ("thermal",),
        "Thermal throttling in {:.0%} of the busy time",
        (Action("", "improve the cooling, or lower the power limit (nvidia-smi -pl)"),),
        least=0.01,
    ),
    "power limit": Rule(
        ("power_capped",),
        "Throttled by the power limit in {:.0%} of the busy time",
        (Action("", "raise the limit if the card and its supply allow it (nvidia-smi -q -d POWER)"),),
        least=0.05,
        weight=0.1,  # a power limit lowers clocks by a few percent only
    ),
    "model waits": Rule(
        ("model_waits",),
        "The model waits for tokenization, copies and files for {:.0%} of the time",
        (Action("", "raise --embed.tokens, run two workers per GPU, or request fewer outputs or --embed.dtype fp16"),),
        least=0.15,
    ),
    "attention": Rule(
        ("attention",),
        "Attention, whose cost grows with the square of the length, takes {:.0%} of the time",
        (Action("", "shorten long sequences with --embed.max_length and --embed.long crop or window"),),
        least=0.4,
    ),
    "products": Rule(
        ("products_of_peak",),
        "Matrix products reach only {:.0%} of the device's peak",
        (Action("", "raise --embed.tokens"),),
        below=0.5,
        weight=0.5,  # the peak itself is out of reach
    ),
}
