"""Kinds of outputs: the interface of the modules in :mod:`inference.models.outputs`, found by their names.

Each module there defines ``KIND``; its name is the output's. The names need no torch, the kinds do.

Shape legend: T tokens of a batch, N sequences, R residues of all of them, D channels of a layer, C channels of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, Protocol

from common.errors import ConfigError
from common.text import did_you_mean
from dataset.embeddings.manifest import Per
from inference.models import outputs
from inference.models.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from dataset.tokens.base import SequenceTokenizer
    from inference.models.packing import Packed
    from model.backbones.base import PackedBackbone


class HasOutputs(Protocol):
    """A model as its outputs read it, so that they need not import :class:`inference.models.model.Model`."""

    facts: ModelFacts
    tokenizer: SequenceTokenizer
    backbone: PackedBackbone
    heads: Mapping[str, Any]

    @property
    def around(self) -> tuple[int, int]:
        """Special tokens before and after each sequence."""


def _hidden_size(model: HasOutputs) -> int | None:
    return model.facts.hidden_size


def _unchanged(model: HasOutputs, hidden_TD: Tensor) -> Tensor:
    return hidden_TD


@dataclass(frozen=True)
class OutputKind:
    """What a kind of output is made of.

    Attributes:
        description: of a row, for the manifest.
        rows: (rows, C) from features (T, C) of a batch; from its tokens (T,) where it reads those.
        per: what has a row; a function of the model where it depends on it.
        reads: hidden states of a layer that is chosen, of the last, or tokens alone.
        features: (T, C) of (T, D) hidden states, shared by kinds with the same function, averaged over windows.
        head: name of the task whose head it takes.
        channels: C; None where the model has no such output.
    """

    description: str
    rows: Callable[[HasOutputs, Tensor, Packed], Tensor]
    per: Per | Callable[[HasOutputs], Per] = "protein"
    reads: Literal["layer", "last", "tokens"] = "layer"
    features: Callable[[HasOutputs, Tensor], Tensor] = _unchanged
    head: str | None = None
    channels: Callable[[HasOutputs], int | None] = _hidden_size


def output_names() -> list[str]:
    """Names of all kinds."""
    return sorted(module.name for module in iter_modules(outputs.__path__))


@cache
def kind_of(name: str) -> OutputKind:
    """The kind of this name."""
    kind: OutputKind = import_module(f"{outputs.__name__}.{name}").KIND
    return kind


def check_names(names: Collection[str], key: str = "outputs") -> None:
    """Raise ConfigError for a name that no kind has."""
    known = output_names()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{key} {name}: there is no such output{did_you_mean(name, known)}; choose of {', '.join(known)}"
            )


def heads_of(names: Collection[str]) -> set[str]:
    """Heads that outputs of these kinds take."""
    return {head for name in names if (head := kind_of(name).head)}
