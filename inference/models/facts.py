"""Properties of an opened model and of its outputs, which travel without it. Nothing here needs torch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataset.embeddings.manifest import Per


class Output(NamedTuple):
    """One output of a model.

    Attributes:
        name: unique, and its file's.
        kind: a module of :mod:`inference.models.outputs`.
        layer: counted from 0, the embeddings; None for what has no layers.
        channels: values of a row.
        per: what has a row.
        description: words for the manifest.
    """

    name: str
    kind: str
    layer: int | None
    channels: int
    per: Per
    description: str


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model.

    Attributes:
        name: as given.
        task: that exported it; None for a model of transformers.
        fingerprint: of weights, architecture and tokenizer, hex.
        num_layers, hidden_size: of the backbone.
        parameters: of backbone and heads.
        longest: residues of the longest sequence that can be taken; None for any.
        special_tokens: that the tokenizer puts around each sequence.
        flops_per_token: of the matrix products of a forward pass.
        attention_flops: of attention in a forward pass, for a token and each token that it attends to.
        device_name: of the device that it is on.
        precision: of the computation.
        random_weights: not trained.
    """

    name: str
    task: str | None
    fingerprint: str
    num_layers: int
    hidden_size: int
    parameters: int
    longest: int | None
    special_tokens: int
    flops_per_token: float
    attention_flops: float
    device_name: str
    precision: str
    random_weights: bool

    def flops(self, tokens_n: NDArray[np.integer]) -> float:
        """FLOP of a forward pass over sequences of so many tokens, nothing padded."""
        squares = float((tokens_n.astype(float) ** 2).sum())
        return self.flops_per_token * float(tokens_n.sum()) + self.attention_flops * squares
