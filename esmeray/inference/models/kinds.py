"""Kinds of outputs: the interface of the modules in :mod:`esmeray.inference.models.outputs`, found by their names; and
what is known of an opened model and of its outputs, which travels without it.

Each module there defines ``KIND``; its name is the output's. The names need no torch, the kinds do.

Shape legend: T tokens of a batch, N sequences, R residues of all of them, D channels of a layer, C channels of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.batches.preparation import FixedCrop
from esmeray.dataset.embeddings.manifest import Per
from esmeray.dataset.tokens.unknown import ALL_KNOWN, UnknownLetters
from esmeray.inference.models import outputs
from esmeray.installation import added, expect

if TYPE_CHECKING:
    from torch import Tensor

    from esmeray.dataset.tokens.base import SequenceTokenizer
    from esmeray.inference.models.packing import ModelInput
    from esmeray.model.backbones.base import PackedBackbone


class Output(NamedTuple):
    """One output of a model.

    ``kind`` names a module of :mod:`esmeray.inference.models.outputs`, ``layer`` counts from 0, the embeddings (None
    for what has no layers), ``channels`` are the values of a row, ``per`` is what has one.
    """

    name: str
    kind: str
    layer: int | None
    channels: int
    per: Per
    description: str


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model, by the name that it was opened by.

    Attributes:
        task: that exported it; None for a model of transformers.
        fingerprint: of weights, architecture and tokenizer, hex.
        longest: residues of the longest sequence that can be taken; None for any.
        special_tokens: that the tokenizer puts around each sequence.
        flops_per_token: of the matrix products of a forward pass.
        attention_flops: of attention in a forward pass, for a token and each token that it attends to.
        arithmetic: instructions and rows of a product, on which the last bits of a vector depend.
        streamed: its layers are read as they are needed, or made of weights of 8 bits.
        unknown: letters that its vocabulary lacks.
    """

    name: str
    task: str | None
    fingerprint: str
    num_layers: int
    hidden_size: int
    longest: int | None
    special_tokens: int
    flops_per_token: float
    attention_flops: float
    device_name: str
    precision: str
    random_weights: bool
    arithmetic: str = ""
    streamed: bool = False
    unknown: UnknownLetters = ALL_KNOWN

    def flops(self, tokens_n: NDArray[np.integer]) -> float:
        """FLOP of a forward pass over sequences of so many tokens, nothing padded."""
        # In float64: the squares of a proteome's lengths sum to more than 32 bits hold.
        squares = float((tokens_n.astype(float) ** 2).sum())
        return self.flops_per_token * float(tokens_n.sum()) + self.attention_flops * squares


class Limit(NamedTuple):
    """The tokens of a text that are used, special ones left out: None for all of them; of a longer text, which."""

    max_length: int | None
    crop: FixedCrop = "start"


class HasOutputs(Protocol):
    """A :class:`~esmeray.inference.models.model.Model` as its outputs read it, which therefore need not import it."""

    facts: ModelFacts
    tokenizer: "SequenceTokenizer"
    backbone: "PackedBackbone"
    heads: Mapping[str, Any]

    @property
    def around(self) -> tuple[int, int]:
        """Special tokens before and after each sequence."""


@dataclass(frozen=True)
class OutputKind:
    """Definition of a kind of output.

    Attributes:
        description: of a row, for the manifest.
        rows: (rows, C) from features (T, C) of a batch; from its tokens (T,) where it reads those.
        per: what has a row; a function of the model where it depends on it.
        reads: hidden states of a layer that is chosen, of the last, or tokens alone.
        features: (T, C) of (T, D) hidden states, shared by kinds with the same function, averaged over windows.
        head: name of the task whose head it takes; a model without it has no such output.
        predicts: a model with it was trained to give it, and is served for nothing else, of texts cropped as then.
        channels: C; None where the model has no such output for another reason.
    """

    description: str
    rows: "Callable[[HasOutputs, Tensor, ModelInput], Tensor]"
    per: Per | Callable[[HasOutputs], Per] = "protein"
    reads: Literal["layer", "last", "tokens"] = "layer"
    features: "Callable[[HasOutputs, Tensor], Tensor]" = lambda model, hidden_TD: hidden_TD
    head: str | None = None
    predicts: bool = False
    channels: Callable[[HasOutputs], int | None] = lambda model: model.facts.hidden_size

    def channels_of(self, model: HasOutputs) -> int | None:
        """C of this model; None where it has no such output."""
        return self.channels(model) if self.head is None or self.head in model.heads else None


def output_names() -> list[str]:
    """Names of all kinds."""
    return sorted([*_shipped(), *_added()])


@cache
def kind_of(name: str) -> OutputKind:
    """The kind of this name."""
    return _added().get(name) or import_module(f"{outputs.__name__}.{name}").KIND


def _shipped() -> tuple[str, ...]:
    # By the folder, not by a list: a new output is a new file, and importing it for its name would load torch.
    return tuple(module.name for module in iter_modules(outputs.__path__))


def _added() -> dict[str, OutputKind]:
    return added("outputs", _shipped(), OutputKind, _checked)


def _checked(name: str, kind: OutputKind) -> OutputKind:
    functions = dict.fromkeys(("rows", "features", "channels"), Callable)
    for attribute, of_type in {**functions, "per": str | Callable, "description": str}.items():
        expect(getattr(kind, attribute), of_type, attribute)
    return kind


def prediction_of(task: str | None) -> str | None:
    """The output that a model of this task was trained to give; None where it was trained for its features."""
    return next((name for name in output_names() if kind_of(name).predicts and kind_of(name).head == task), None)
