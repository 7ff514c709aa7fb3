"""Texts through a model, batch after batch: the only forward loop of inference (:mod:`esmeray.model.forward_loop`).

Shape legend: n texts of a batch, C channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from esmeray.common.errors import DataError
from esmeray.dataset.batches.plan import longest_first
from esmeray.inference.models.kinds import Output
from esmeray.inference.models.model import Model
from esmeray.inference.models.packing import Tokenized, pack
from esmeray.model.forward_loop import ForwardLoop, Places


class Texts(Protocol):
    """Texts that a model is run on; ``lengths`` (N,) are the rows of each in an output of residues."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def batches(self, token_budget: int | None) -> list[Places]:
        """Places of the texts of each batch; all in one where there is no budget."""

    def launch(self, model: Model, places: Places, outputs: Sequence[Output]) -> dict[str, Tensor]:
        """Rows of these texts, on the device."""

    def name(self, place: int) -> str:
        """Name of a text and its size, for messages."""


class TokenizedTexts:
    """Texts that :meth:`Model.tokenize` made."""

    def __init__(self, tokenized: Tokenized, model: Model) -> None:
        self.tokenized, self._special = tokenized, model.facts.special_tokens
        self.lengths = tokenized.lengths

    def batches(self, token_budget: int | None) -> list[Places]:
        if token_budget is None:
            return [np.arange(self.lengths.size)]
        return longest_first(self.lengths + self._special, token_budget)

    def launch(self, model: Model, places: Places, outputs: Sequence[Output]) -> dict[str, Tensor]:
        packed = pack(model.tokenizer, [self.tokenized.pieces[place] for place in places.tolist()])
        return model.rows(packed.to(model.device), outputs)

    def name(self, place: int) -> str:
        return f"sequence {place + 1} of {self.lengths[place] + self._special:,} tokens"


class BatchRows(NamedTuple):
    """Rows of the texts of a batch: (n,) their places and lengths in residues; (rows, C) by name of the output, text
    after text; and the batches that were halved for memory until now."""

    places: Places
    lengths: NDArray[np.int64]
    arrays: Mapping[str, NDArray]
    splits: int

    def by_text(self, output: Output) -> list[NDArray]:
        sizes = {"protein": np.ones_like(self.lengths), "residue": self.lengths, "pair": self.lengths**2}[output.per]
        return np.split(self.arrays[output.name], np.cumsum(sizes)[:-1])


def run(
    model: Model,
    texts: Texts | Sequence[str],
    outputs: Sequence[Output],
    token_budget: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Iterator[BatchRows]:
    """The rows of each batch, while the device computes the next.

    ``token_budget`` of a batch, special tokens included; a longer text goes alone. ``dtype``: of what has a row for
    each residue or pair. Raises DataError where a value is not finite, ResourceError where a single text is out of
    memory.
    """
    if isinstance(texts, Sequence):
        texts = TokenizedTexts(model.tokenize(texts), model)
    proteins = {output.name for output in outputs if output.per == "protein"} | {"finite"}

    def launch(places: Places) -> dict[str, Tensor]:
        rows = texts.launch(model, places, outputs)
        # Cast on the device, before the copy: half the bytes go to the host.
        return {name: row if name in proteins else row.to(dtype) for name, row in rows.items()}

    loop = ForwardLoop(model.device, launch, texts.name)
    with record_function("pack"):
        batches = texts.batches(token_budget)
    for places, tensors in loop.run(batches):
        # Looked at here and not on the device, where it would make the host wait before the next batch is launched.
        if not tensors.pop("finite"):
            names = ", ".join(texts.name(place) for place in places[:3].tolist())
            raise DataError(
                f"the model gives NaN or infinity in the batch of {names} ...; check its weights, or choose another "
                "precision"
            )
        arrays = {name: _array(tensor) for name, tensor in tensors.items()}
        yield BatchRows(places, texts.lengths[places], arrays, loop.splits)


def _array(tensor: Tensor) -> NDArray:
    """The tensor as an array; bits of bf16, which NumPy lacks, as uint16."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
