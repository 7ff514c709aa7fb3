"""Tensors in the safetensors of a Hugging Face folder: file positions, to read one at a time.

Names are those in :class:`esmeray.model.backbones.esm2_network.EsmForMaskedLM`.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from esmeray.common.command_line import warn
from esmeray.common.errors import DataError, parsing, read_json, reading
from esmeray.common.publishing import verified
from esmeray.common.text import counted
from esmeray.model.backbones.source import MODEL_FILE

_NOT_NAMED = re.compile(
    r"position_ids|(^|\.)(pooler|position_embeddings|rotary_embeddings)\.|^(cls\.predictions|lm_head)\."
)
"""Tensors not reported as left out: unneeded or computed ones, and masked-LM heads, which are read on request."""
REMEDY = "fetch or export them again"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}


class StoredTensor(NamedTuple):
    """Location of a tensor: ``offset`` in bytes from the start of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self, *, once: bool = False) -> Tensor:
        """Read the tensor as stored, to the CPU; ``once``: it will not be read again soon.

        Raises DataError if the file can't be read any more, or was truncated.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with reading(self.path, REMEDY), self.path.open("rb", buffering=0) as file:
            # Read, not mapped: mapped pages count as process memory, and are three times slower.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            file.seek(self.offset)
            view = tensor.view(-1).view(torch.uint8).numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise DataError(f"{self.path}: was truncated after it was opened; {REMEDY}")
                view = view[count:]
            if once:  # drop it from the page cache, where it would displace other files before the next pass
                os.posix_fadvise(file.fileno(), self.offset, tensor.nbytes, os.POSIX_FADV_DONTNEED)
        return tensor


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return tensors of a transformers folder by name; integers are left out, except 8-bit ones.

    Reads headers only, and whole files if there is a checksum to compare. Raises DataError for damage.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _files(folder):
        verified(path)
        # safetensors' reader validates sizes and offsets, but does not expose them.
        with parsing(path, REMEDY, SafetensorError), safe_open(path, "pt"), path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(size))
        for key, entry in header.items():
            if key != "__metadata__" and entry["dtype"] in _DTYPES:
                offset = 8 + size + entry["data_offsets"][0]
                tensors.setdefault(
                    _own_name(key), StoredTensor(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), offset)
                )
    return tensors


def _files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    index = folder / "model.safetensors.index.json"
    with parsing(index, REMEDY):
        names = read_json(verified(index), REMEDY)["weight_map"].values()
        # File names only: paths in a foreign index may point anywhere.
        return sorted({folder / Path(name).name for name in names})


def warn_left_out(folder: Path, names: Iterable[str]) -> None:
    """Warn of a folder's tensors that the network does not use, by module: their outputs are unavailable."""
    left_out = [name for name in names if not _NOT_NAMED.search(name)]
    # An export has its head next to the backbone, and Esmeray loads it.
    if left_out and not (folder / MODEL_FILE).is_file():
        modules = ", ".join(sorted({".".join(name.split(".")[:2]) for name in left_out}))
        warn(f"{folder}: {counted(len(left_out), 'tensor{s}')} of the checkpoint not loaded: {modules}")


def num_parameters(folder: Path) -> int:
    return sum(math.prod(stored.shape) for stored in stored_tensors(folder).values())


def _own_name(name: str) -> str:
    """Return a tensor's name in this package: files may have a prefix, and older names of norms and rotary tables."""
    name = re.sub(r"encoder\.layer\.[\d*]+\.attention\.self\.(?=rotary_embeddings\.)", "", name)
    # save_pretrained (transformers 5.23) writes ESM-2 by the names of older checkpoints, which from_pretrained accepts.
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name if name.startswith(("esm.", "lm_head.")) else f"esm.{name}"
