"""Layers streamed from safetensors while the previous ones compute, for models larger than memory.

In: the folder of an ESM-2's weights, and its layers without weights. Out: an iterable list of layers. At most three
layers are in memory. A layer of P weights needs 2PT operations for T tokens. The required read bandwidth is therefore
proportional to the speed of computing divided by T, whatever the size of the model. To make T large, several batches
pass a layer before the next one (:meth:`esmeray.model.backbones.base.PackedBackbone.hidden_states_of`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esmeray.common.background_thread import BackgroundThread
from esmeray.model.backbones.int8 import SCALES, dequantized
from esmeray.model.backbones.stored_weights import StoredTensor


class StreamedLayers(nn.ModuleList):
    """List of streamed layers (see the module); each iteration reads all layers. For inference only.

    ``layers``: on the meta device. ``stored``: their tensors by the names of :meth:`state_dict`, with the scales of
    8-bit weights. Weights get the dtype and device to which this list is cast and moved, and pass through
    :attr:`prepare`. ``held``: tensors are read once and stay on the device; otherwise they stay in pinned memory on
    CUDA.
    """

    def __init__(self, layers: nn.ModuleList, stored: Mapping[str, StoredTensor], *, held: bool = False) -> None:
        super().__init__(layers)
        self.stored = stored
        self._is_held = held
        self._kept: dict[int, dict[str, Tensor]] = {}
        self.prepare: Callable[[nn.Module], object] = lambda layer: None
        self._like = torch.empty(0)
        # CUDA only, from here on.
        self._copies: torch.cuda.Stream | None = None
        self._computed: torch.cuda.Event | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "StreamedLayers":
        # Tracks dtype and device with a dummy tensor, since its own tensors have no values.
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
        """Return a layer with weights; ``computed``: event after which the layers before the last one are free."""
        tensors = self._tensors(index)
        if self._copies is None:
            tensors = dequantized(tensors, self._like.dtype)
        else:
            # Launches run ahead of execution: without waiting, weights would fill the device or be overwritten.
            if computed is not None:
                computed.synchronize()
            with torch.cuda.stream(self._copies):
                tensors = {name: tensor.to(self._like.device, non_blocking=True) for name, tensor in tensors.items()}
                tensors = dequantized(tensors, self._like.dtype)
            self._copies.synchronize()  # this thread waits while the main one launches
        layer = copy.deepcopy(self[index])
        layer.load_state_dict(tensors, assign=True)
        self.prepare(layer)
        return layer

    def _tensors(self, index: int) -> dict[str, Tensor]:
        """Return a layer's tensors in its compute dtype, or int8 with scales."""
        if index in self._kept:
            return self._kept[index]
        tensors = {}
        # Sorted by name, the order in the file.
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
        """Return a tensor of :meth:`state_dict` on the host, in fp32."""
        both = {key: self.stored[key].read(once=True) for key in (name, name + SCALES) if key in self.stored}
        return dequantized(both, torch.float32)[name].float()


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, one at a time; streamed ones are read in fp32."""
    stored = {
        f"{prefix}.{name}": partial(layers.read, name)
        for prefix, layers in module.named_modules()
        if isinstance(layers, StreamedLayers)
        for name in layers.stored
    }
    for name, tensor in sorted(module.state_dict().items()):  # independent of the order of module creation
        yield name, stored[name]() if name in stored else tensor
