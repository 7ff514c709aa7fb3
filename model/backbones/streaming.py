"""Layers that are read from safetensors while the ones before compute, for models larger than the memory.

In: the folder of an ESM-2's weights, and its layers without any. Out: a list of layers that is iterated over as one in
memory is; at most three are there at any time. A layer of P weights needs 2PT operations for T tokens, so that the
bytes a second that have to be read are those operations divided by T, whatever the size of the model: many batches pass
a layer before the next (:meth:`esmeray.model.backbones.base.PackedBackbone.hidden_states_of`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from esmeray.common.background_thread import BackgroundThread
from esmeray.model.backbones.stored_weights import StoredTensor

_Parts: TypeAlias = dict[str, tuple[Tensor, ...]]
"""Tensors by name, each the product of what stands there: itself alone, or int8 and its scales."""


class StreamedLayers(nn.ModuleList):
    """See the module; each iteration reads all layers. For inference alone.

    ``layers``: on the meta device. ``stored``: their tensors by the names of :meth:`state_dict`. The weights of a layer
    have the dtype and the device to which this list is cast and moved, and go through :attr:`prepare`; on CUDA they are
    kept in pinned memory. ``eight_bit``: they are kept in int8, and are read once.
    """

    def __init__(self, layers: nn.ModuleList, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__(layers)
        self.stored = stored
        self.prepare: Callable[[nn.Module], object] = lambda layer: None
        self.eight_bit = False
        self._like = torch.empty(0)
        self._held: dict[int, _Parts] = {}
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
        parts = self._parts(index)
        if self._copies is not None:
            # Layers are launched faster than they run: the device would fill with weights, and these be overwritten.
            if computed is not None:
                computed.synchronize()
            with torch.cuda.stream(self._copies):
                parts = _each(lambda tensor: tensor.to(self._like.device, non_blocking=True), parts)
            self._copies.synchronize()  # this thread waits, while the other one launches
        tensors = {name: reduce(torch.mul, factors).to(self._like.dtype) for name, factors in parts.items()}
        layer = copy.deepcopy(self[index])
        layer.load_state_dict(tensors, assign=True)
        self.prepare(layer)
        return layer

    def _parts(self, index: int) -> _Parts:
        """Those of a layer on the host, in the dtype in which it computes or in 8 bits."""
        if index in self._held:
            return self._held[index]
        parts: _Parts = {}
        # By name, as they lie in the file.
        for name in sorted(self[index].state_dict()):
            tensor = self.stored[f"{index}.{name}"].read(once=True)
            is_matrix = self.eight_bit and tensor.ndim > 1
            parts[name] = _in_8_bits(tensor) if is_matrix else (tensor.to(self._like.dtype),)
        if self._like.is_cuda:
            parts = _each(Tensor.pin_memory, parts)
        if self._like.is_cuda or self.eight_bit:
            self._held[index] = parts
        return parts


def _each(change: Callable[[Tensor], Tensor], parts: _Parts) -> _Parts:
    return {name: tuple(map(change, factors)) for name, factors in parts.items()}


def _in_8_bits(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(O, I) int8 and (O, 1) fp32 scales, by output channel: their product is within half a scale of the weight."""
    weight_OI = weight_OI.float()
    scales_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight_OI / scales_O1).round().to(torch.int8), scales_O1


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, in fp32 where they have to be read, one at a time."""
    stored = {
        f"{prefix}.{name}": tensor
        for prefix, layers in module.named_modules()
        if isinstance(layers, StreamedLayers)
        for name, tensor in layers.stored.items()
    }
    for name, tensor in sorted(module.state_dict().items()):  # by name, in whatever order modules were made
        yield name, stored[name].read(once=True).float() if name in stored else tensor
