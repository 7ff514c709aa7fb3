"""Weights of 8 bits: a copy of an ESM-2's layers in this node's cache, a byte a weight, and back to what computes.

In: the tensors of the layers as they are stored. Out: those of the copy, by the same names: of a product its weights in
int8 and a scale for each output channel in fp32, symmetric and rounded to nearest; norms and biases as they were. It is
the bytes that are read and held that get fewer: products are of the weights made of them, in the precision of the
model, since products in int8 are slower than in bf16 on CPUs.

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
"""Behind the name of the weights."""
_ROWS = 256
"""Output channels that are widened together: all of a large product would be gigabytes in fp32."""


def int8_copy(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same layers, a byte a weight, written where the cache has none of these files.

    ``stored``: tensors by name, ``esm.encoder.layer.0...``. Raises DataError for weights that are not finite, or a copy
    that is damaged; ResourceError where it has no place.
    """
    # By the files and not by their bytes, which would all have to be read at each start.
    files = {tensor.path.resolve() for tensor in stored.values()}
    # With change time and inode: a file that is replaced in place may keep its size and modification time.
    statuses = {path: path.stat() for path in files}
    states = sorted(
        f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        for path, status in statuses.items()
    )
    size = sum(math.prod(tensor.shape) for tensor in stored.values())
    return stored_tensors(cached_folder(f"8 bits of {min(files)}", str(states), size, partial(_write, stored)))


def _write(stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """A file for each tensor, so that no more than one is in memory."""
    files: dict[str, str] = {}
    with record_bar("weights of 8 bits") as bar:
        for count, (name, tensor) in enumerate(stored.items(), 1):
            values = tensor.read(once=True).float().numpy()
            # Rounded, they would be numbers like any other.
            if not np.isfinite(values).all():
                raise DataError(f"{tensor.path}: the weights {name} hold NaN or infinity; {REMEDY}")
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


def widened(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer without scales, weights of int8 in ``dtype``, rounded from fp32."""
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
