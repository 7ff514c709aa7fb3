"""Layers that are read from safetensors while the ones before compute, for models larger than the memory.

In: the folder of an ESM-2's weights, and its layers without any. Out: a list of layers that is iterated over as one in
memory is; at most three are there at any time. A layer of P weights needs 2PT operations for T tokens, so that the
bytes a second that have to be read are those operations divided by T, whatever the size of the model: many batches pass
a layer before the next (:meth:`esmeray.model.backbones.base.PackedBackbone.hidden_states_of`).
"""

import copy
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from esmeray.common.background_thread import BackgroundThread
from esmeray.common.errors import DataError, parsing, read_json, reading
from esmeray.common.text import first_line
from esmeray.common.verification import verified

REMEDY = "fetch or export them again"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names that transformers 5 still writes."""


class StoredTensor(NamedTuple):
    """Where a tensor lies: ``offset`` in bytes from the start of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """On the CPU, as it is stored. Raises DataError where the file can't be read any more, or is shorter by now."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with reading(self.path, REMEDY), self.path.open("rb", buffering=0) as file:
            # Read and not mapped: mapped pages count as the process's memory, and come at a third of the speed.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            file.seek(self.offset)
            view = tensor.view(-1).view(torch.uint8).numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise DataError(f"{self.path}: has become shorter since it was opened; {REMEDY}")
                view = view[count:]
            # The next pass comes too late to find it in the page cache, where it would displace what others need.
            os.posix_fadvise(file.fileno(), self.offset, tensor.nbytes, os.POSIX_FADV_DONTNEED)
        return tensor


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of a folder of transformers by the names that they have in an EsmModel; integers are left out.

    Only headers are read, and whole files where there is a checksum to compare. Raises DataError for damage.
    """
    tensors = {}
    for path in _files(folder):
        verified(path)
        # safetensors' own reader checks that sizes and offsets are those of the file; it does not give them away.
        try:
            with safe_open(path, "pt"), path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header: dict[str, Any] = json.loads(file.read(size))
        except (SafetensorError, OSError) as error:
            raise DataError(f"the weights in {folder} can't be read ({first_line(error)}); {REMEDY}") from error
        for key, entry in header.items():
            if key != "__metadata__" and entry["dtype"] in _DTYPES:
                name = key.removeprefix("esm.")
                for old, new in _LEGACY.items():
                    name = name.replace(old, new)
                tensors[name] = StoredTensor(
                    path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
                )
    return tensors


def _files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    index = folder / "model.safetensors.index.json"
    with parsing(index, REMEDY):
        names = read_json(verified(index), REMEDY)["weight_map"].values()
        # By their names alone: an index of others may point anywhere.
        return sorted({folder / Path(name).name for name in names})


def num_parameters(folder: Path) -> int:
    return sum(math.prod(stored.shape) for stored in stored_tensors(folder).values())


class StreamedLayers(nn.ModuleList):
    """See the module; each iteration reads all layers. For inference alone.

    ``layers``: on the meta device. ``stored``: their tensors by the names of :meth:`state_dict`. The weights of a layer
    have the dtype and the device to which this list is cast and moved, and go through :attr:`prepare`; on CUDA they are
    kept in pinned memory.
    """

    def __init__(self, layers: nn.ModuleList, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__(layers)
        self.stored = stored
        self.prepare: Callable[[nn.Module], object] = lambda layer: None
        self._like = torch.empty(0)
        # What follows is of CUDA alone.
        self._pinned: dict[int, dict[str, Tensor]] = {}
        self._copies: torch.cuda.Stream | None = None
        self._computed: torch.cuda.Event | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "StreamedLayers":
        # In place of its own tensors, which have no values to be cast or moved.
        self._like = fn(self._like)
        self._copies = torch.cuda.Stream(self._like.device) if self._like.is_cuda else None
        return self

    def __iter__(self) -> Iterator[nn.Module]:
        thread: BackgroundThread[nn.Module] = BackgroundThread()
        try:
            thread.begin(partial(self._layer, 0, self._computed))
            for index in range(len(self)):
                layer = thread.wait()
                if index + 1 < len(self):
                    thread.begin(partial(self._layer, index + 1, self._computed))
                yield layer
                if self._copies is not None:
                    self._computed = torch.cuda.current_stream(self._like.device).record_event()
        finally:
            thread.close()

    def _layer(self, index: int, computed: torch.cuda.Event | None) -> nn.Module:
        """A layer with its weights; ``computed``: the event after which the layers before the last one's are free."""
        tensors = self._tensors(index)
        if self._copies is not None:
            # Layers are launched faster than they run: the device would fill with weights, and these be overwritten.
            if computed is not None:
                computed.synchronize()
            with torch.cuda.stream(self._copies):
                tensors = {name: tensor.to(self._like.device, non_blocking=True) for name, tensor in tensors.items()}
            self._copies.synchronize()  # this thread waits, while the other one launches
        layer = copy.deepcopy(self[index])
        layer.load_state_dict(tensors, assign=True)
        self.prepare(layer)
        return layer

    def _tensors(self, index: int) -> dict[str, Tensor]:
        """Those of a layer on the host, in the dtype in which it computes."""
        if index in self._pinned:
            return self._pinned[index]
        # By name, as they lie in the file.
        names = sorted(self[index].state_dict())
        tensors = {name: self.stored[f"{index}.{name}"].read().to(self._like.dtype) for name in names}
        if self._like.is_cuda:
            self._pinned[index] = tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors


def stored_state(module: nn.Module, prefix: str, folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a module, which stands in an EsmModel at that prefix. Raises DataError where the folder has
    others."""
    stored = stored_tensors(folder)
    state = {}
    for name, tensor in module.state_dict().items():
        key = f"{prefix}.{name}"
        if key not in stored:
            raise DataError(f"the weights in {folder} lack {key}; {REMEDY}")
        if stored[key].shape != tuple(tensor.shape):
            raise DataError(f"the weights in {folder} have another shape than config.json says at {key}; {REMEDY}")
        state[name] = stored[key]
    return state


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, in fp32 where they have to be read, one at a time."""
    stored = {
        f"{prefix}.{name}": tensor
        for prefix, layers in module.named_modules()
        if isinstance(layers, StreamedLayers)
        for name, tensor in layers.stored.items()
    }
    for name, tensor in sorted(module.state_dict().items()):  # by name, in whatever order modules were made
        yield name, stored[name].read().float() if name in stored else tensor
