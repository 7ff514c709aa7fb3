"""Models opened on the CPU, and the rows of their outputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from esmeray.inference.models.model import Model
from esmeray.inference.models.opening import open_model


def opened(source: Path | str, **more: Any) -> Model:
    return open_model(source, more.pop("precision", "fp32"), "cpu", **more)


def rows_of(
    model: Model, sequences: Sequence[str], kinds: Sequence[str] = ("mean",), layers: Sequence[int] = (-1,)
) -> dict[str, Tensor]:
    """Rows of these outputs, with all sequences in one batch."""
    inputs = model.input_of([sequence.encode() for sequence in sequences])
    return model.rows([inputs], model.outputs(kinds, layers))[0]
