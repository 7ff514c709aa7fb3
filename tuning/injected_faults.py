"""Failures on purpose, inside real workers: what a search or a pool of workers does about them can then be tested.

In: for which settings what is to happen. Out: the failure, in the worker's step, as it would come by itself.
"""

from __future__ import annotations

import operator
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

Fault: TypeAlias = Literal["out_of_memory", "crash", "hang", "nan"]

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"(\w+)\s*(>=|<=|==|!=|>|<)\s*(\w+)")


@dataclass(frozen=True)
class Faults:
    """What fails where.

    Attributes:
        rules: condition -> fault, as ``{"tokens>=16384 and workers==2": "crash"}``. A condition compares fields of an
            object with a number or a word; the first that holds counts.
    """

    rules: Mapping[str, Fault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for condition, fault in self.rules.items():
            if fault not in get_args(Fault):
                raise ValueError(f"{fault!r} is no fault; there are {', '.join(get_args(Fault))}")
            _parsed(condition)

    def of(self, settings: object) -> Fault | None:
        """What is to happen with these settings."""
        for condition, fault in self.rules.items():
            if all(_holds(settings, *part) for part in _parsed(condition)):
                return fault
        return None


def happen(fault: Fault, model: nn.Module) -> None:
    """Fail.

    Args:
        fault: ``out_of_memory`` raises what torch raises; ``crash`` kills this process; ``hang`` never returns; ``nan``
            spoils the model's parameters, so that the loss of the step that follows is NaN.
        model: the model of the step.

    Raises:
        torch.OutOfMemoryError: that is the fault.
    """
    if fault == "out_of_memory":
        raise torch.OutOfMemoryError("injected: out of memory")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


def _parsed(condition: str) -> list[tuple[str, str, str]]:
    parts = []
    for text in condition.split(" and "):
        match = _CONDITION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{condition!r}: expected conditions such as 'tokens>=16384', joined by 'and'")
        parts.append((match[1], match[2], match[3]))
    return parts


def _holds(settings: object, name: str, comparison: str, value: str) -> bool:
    actual = getattr(settings, name)
    if isinstance(actual, bool):
        return _COMPARISONS[comparison](str(actual).lower(), value.lower())
    if isinstance(actual, int | float):
        return _COMPARISONS[comparison](actual, float(value))
    return _COMPARISONS[comparison](str(actual), value)
