"""8-bit weights: a copy of an ESM-2's layers in this node's cache, one byte per weight, dequantized for computation.

In: tensors of the layers as stored. Out: tensors of the copy by the same names. Weights of linear layers are int8 with
one fp32 scale per output channel, symmetric, rounded to nearest; norms and biases are unchanged. This reduces bytes
read and held in memory. Products use dequantized weights in the model's precision, since int8 products are slower than
bf16 on CPUs.

Shape legend: O output channels, I input channels.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esmeray.common.errors import DataError
from esmeray.common.progress import record_bar
from esmeray.common.publishing import list_files
from esmeray.common.remote import cached_folder
from esmeray.dataset.embeddings.arrays import quantized, scales_of, write_arrays
from esmeray.model.backbones.stored_weights import REMEDY, StoredTensor, stored_tensors

SCALES = ".scales"
"""Suffix of the scales' names, after the name of the weights."""
_ROWS = 256
"""Output channels dequantized at a time: a whole large matrix would take gigabytes in fp32."""


def int8_copy(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the same layers with one byte per weight, written if the cache lacks a copy of these files.

    ``stored``: tensors by name, ``esm.encoder.layer.0...``. Raises DataError for weights that are not finite, or a
    damaged copy; ResourceError if there is no space.
    """
    # Keyed by file status, not content, which would have to be read at each start.
    files = {tensor.path.resolve() for tensor in stored.values()}
    # With change time and inode: a file replaced in place may keep size and modification time.
    statuses = {path: path.stat() for path in files}
    states = sorted(
        f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        for path, status in statuses.items()
    )
    size = sum(math.prod(tensor.shape) for tensor in stored.values())
    folder = cached_folder(f"8 bits of {min(files)}", str(states), size, partial(_write, stored))
    return stored_tensors(folder)


def _write(stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Write one file per tensor, so that only one is in memory."""
    files: dict[str, str] = {}
    with record_bar("8-bit weights") as bar:
        for count, (name, tensor) in enumerate(stored.items(), 1):
            values = tensor.read(once=True).float().numpy()
            # Rounding would turn them into ordinary numbers.
            if not np.isfinite(values).all():
                raise DataError(f"{tensor.path}: the weights {name} contain NaN or infinity; {REMEDY}")
            arrays = {name: values}
            if values.ndim == 2:
                scales_O1 = scales_of(np.abs(values).max(axis=1))[:, None]
                arrays = {name: quantized(values, scales_O1), name + SCALES: scales_O1}
            file = f"{name}.safetensors"
            write_arrays(folder / file, arrays)
            files |= dict.fromkeys(arrays, file)
            bar(count / len(stored), count)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    list_files(folder, "weights int8")


def dequantized(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a layer's tensors without scales: int8 weights dequantized to ``dtype``, computed in fp32."""
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    for name in tensors.keys() - whole.keys():
        product = name.removesuffix(SCALES)
        whole[product] = _product(whole[product], tensors[name], dtype)
    return whole


def _product(values_OI: Tensor, scales_O1: Tensor, dtype: torch.dtype) -> Tensor:
    weights_OI = torch.empty_like(values_OI, dtype=dtype)
    for start in range(0, len(values_OI), _ROWS):
        rows = slice(start, start + _ROWS)
        weights_OI[rows] = values_OI[rows] * scales_O1[rows]
    return weights_OI
