"""Layers that are read from safetensors while the ones before compute, for models larger than the memory.

In: the folder of an ESM-2's weights, and its layers without any. Out: a list of layers that is iterated over as one in
memory is; at most three are there at any time. A layer of P weights needs 2PT operations for T tokens, so that the
bytes a second that have to be read are those operations divided by T, whatever the size of the model: many batches pass
a layer before the next (:meth:`esmeray.model.backbones.base.PackedBackbone.hidden_states_of`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esmeray.common.background_thread import BackgroundThread
from esmeray.model.backbones.int8 import SCALES, widened
from esmeray.model.backbones.stored_weights import StoredTensor


class StreamedLayers(nn.ModuleList):
    """See the module; each iteration reads all layers. For inference alone.

    ``layers``: on the meta device. ``stored``: their tensors by the names of :meth:`state_dict`, and the scales of
    weights of 8 bits. The weights of a layer have the dtype and the device to which this list is cast and moved, and go
    through :attr:`prepare`. ``held``: what is stored is read once and stays on the device; else on CUDA in pinned
    memory.
    """

    def __init__(self, layers: nn.ModuleList, stored: Mapping[str, StoredTensor], *, held: bool = False) -> None:
        super().__init__(layers)
        self.stored = stored
        self._is_held = held
        self._kept: dict[int, dict[str, Tensor]] = {}
        self.prepare: Callable[[nn.Module], object] = lambda layer: None
        self._like = torch.empty(0)
        # What follows is of CUDA alone.
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
        if self._copies is None:
            tensors = widened(tensors, self._like.dtype)
        else:
            # Layers are launched faster than they run: the device would fill with weights, and these be overwritten.
            if computed is not None:
                computed.synchronize()
            with torch.cuda.stream(self._copies):
                tensors = {name: tensor.to(self._like.device, non_blocking=True) for name, tensor in tensors.items()}
                tensors = widened(tensors, self._like.dtype)
            self._copies.synchronize()  # this thread waits, while the other one launches
        layer = copy.deepcopy(self[index])
        layer.load_state_dict(tensors, assign=True)
        self.prepare(layer)
        return layer

    def _tensors(self, index: int) -> dict[str, Tensor]:
        """Those of a layer, in the dtype in which it computes, or of 8 bits with scales."""
        if index in self._kept:
            return self._kept[index]
        tensors = {}
        # By name, as they lie in the file.
        for name in sorted(name for name in self.stored if name.startswith(f"{index}.")):
            tensor = self.stored[name].read(once=True)
            is_of_8_bits = name.endswith(SCALES) or name + SCALES in self.stored
            tensors[name.removeprefix(f"{index}.")] = tensor if is_of_8_bits else tensor.to(self._like.dtype)
        if self._is_held:
            self._kept[index] = tensors = {name: tensor.to(self._like.device) for name, tensor in tensors.items()}
        elif self._like.is_cuda:
            self._kept[index] = tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors

    def read(self, name: str) -> Tensor:
        """A tensor of :meth:`state_dict` on the host, in fp32."""
        both = {key: self.stored[key].read(once=True) for key in (name, name + SCALES) if key in self.stored}
        return widened(both, torch.float32)[name].float()


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, in fp32 where they have to be read, one at a time."""
    stored = {
        f"{prefix}.{name}": partial(layers.read, name)
        for prefix, layers in module.named_modules()
        if isinstance(layers, StreamedLayers)
        for name in layers.stored
    }
    for name, tensor in sorted(module.state_dict().items()):  # by name, in whatever order modules were made
        yield name, stored[name]() if name in stored else tensor
