"""Kinds of outputs, and the properties of an opened model and its outputs.

:mod:`esmeray.inference.models.outputs` has a module per kind. Each defines ``KIND``, and its name is the output's name.
Listing the names does not import torch; loading a kind does. Model properties are plain values that can be sent without
the model.

Shape legend: T tokens of a batch, N sequences, R residues of all of them, D channels of a layer, C channels of a row.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.batches.preparation import FixedCrop
from esmeray.dataset.embeddings.manifest import Per
from esmeray.dataset.fasta.alphabet import ALL_KNOWN, UnknownLetters
from esmeray.inference.models import outputs
from esmeray.installation import added, expect

if TYPE_CHECKING:
    from torch import Tensor

    from esmeray.inference.models.model import Model
    from esmeray.inference.models.packing import ModelInput


class Output(NamedTuple):
    """One output of a model.

    Attributes:
        kind: module name in :mod:`esmeray.inference.models.outputs`.
        layer: layer number, 0 for the embeddings; None if the output does not depend on a layer.
        channels: values per row.
        per: unit that has a row.
        masked: as in :class:`OutputKind`.
    """

    name: str
    kind: str
    layer: int | None
    channels: int
    per: Per
    description: str
    masked: bool = False


def passes(outputs: Collection[Output], lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the (N,) number of times that a model reads each sequence for these outputs."""
    num_masked = sum(output.masked for output in outputs)
    # All outputs that mask nothing share a pass.
    return num_masked * lengths_N + (not outputs or num_masked < len(outputs))


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model, with the name that was used to open it.

    Attributes:
        task: task that exported the model; None for a transformers model.
        fingerprint: hash of weights, architecture and tokenizer, hex.
        longest: maximum residues of a sequence; None for no maximum.
        special_tokens: number of special tokens that the tokenizer adds per sequence.
        flops_per_token: FLOP of the matrix products of a forward pass, per token.
        attention_flops: FLOP of attention in a forward pass, per pair of tokens.
        arithmetic: instruction set and rows of a matrix product; the last bits of a vector depend on them.
        streamed: layers are read on demand, or have 8-bit weights.
        unknown: letters that the vocabulary lacks.
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

    def flops(self, lengths_n: NDArray[np.int64], outputs: Collection[Output]) -> float:
        """FLOP of the forward passes over sequences of these numbers of residues, without padding."""
        # In float64, because the sum of squared lengths of a proteome exceeds 32 bits.
        tokens_n = (lengths_n + self.special_tokens).astype(float)
        read_n = passes(outputs, lengths_n) * tokens_n
        return float((self.flops_per_token * read_n + self.attention_flops * read_n * tokens_n).sum())


class Limit(NamedTuple):
    """Maximum tokens of a text, without special tokens (None for no maximum), and the part of a longer text to keep."""

    max_length: int | None
    crop: FixedCrop = "start"


@dataclass(frozen=True)
class OutputKind:
    """Definition of a kind of output.

    Attributes:
        description: description of a row, for the manifest.
        rows: function that computes (rows, C) from a batch's features (T, C), or from its tokens (T,) if ``reads`` is
            tokens.
        per: unit that has a row, or a function of the model.
        reads: input of the kind: hidden states of a chosen layer, of the last layer, or tokens only.
        features: function from hidden states (T, D) to features (T, C). Kinds with the same function share the result,
            and it is averaged over windows.
        head: task whose head the kind needs; a model without it lacks the output.
        predicts: the model was trained for this output. It is served for this output only, and its texts are cropped as
            in training.
        masked: each residue is masked in a pass of its own, so that a sequence of L residues takes L passes.
        channels: function that returns C, or None if the model lacks the output for another reason.
    """

    description: str
    rows: "Callable[[Model, Tensor, ModelInput], Tensor]"
    per: "Per | Callable[[Model], Per]" = "protein"
    reads: Literal["layer", "last", "tokens"] = "layer"
    features: "Callable[[Model, Tensor], Tensor]" = lambda model, hidden_TD: hidden_TD
    head: str | None = None
    predicts: bool = False
    masked: bool = False
    channels: "Callable[[Model], int | None]" = lambda model: model.facts.hidden_size

    def channels_of(self, model: "Model") -> int | None:
        """C for this model; None if it lacks the output."""
        return self.channels(model) if self.head is None or self.head in model.heads else None


def output_names() -> list[str]:
    """Names of all kinds, sorted."""
    return sorted([*_shipped(), *_added()])


@cache
def kind_of(name: str) -> OutputKind:
    """Return the kind with this name."""
    return _added().get(name) or import_module(f"{outputs.__name__}.{name}").KIND


def _shipped() -> tuple[str, ...]:
    # Listed from the folder, so that a new output needs no registration. Importing the modules would load torch.
    return tuple(module.name for module in iter_modules(outputs.__path__))


def _added() -> dict[str, OutputKind]:
    return added("outputs", _shipped(), OutputKind, _checked)


def _checked(name: str, kind: OutputKind) -> OutputKind:
    functions = dict.fromkeys(("rows", "features", "channels"), Callable)
    for attribute, of_type in {**functions, "per": str | Callable, "description": str}.items():
        expect(getattr(kind, attribute), of_type, attribute)
    return kind


def prediction_of(task: str | None) -> str | None:
    """Output that a model of this task was trained for; None if it was trained for its features."""
    return next((name for name in output_names() if kind_of(name).predicts and kind_of(name).head == task), None)
