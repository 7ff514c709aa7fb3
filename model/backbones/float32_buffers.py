"""A base for modules whose buffers must stay fp32 when the model is cast to bf16 or fp16.

``module.bfloat16()``, which training engines call, casts buffers too. Rotary frequencies in bf16 are off by up to
0.4 %, which at position 1000 is a turn of four radians; feature scales lose the same share.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn


class Float32Buffers(nn.Module):
    """Keeps the dtype of this module's own buffers through casts; they still move between devices."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            applied = self._buffers[name]
            if applied is not None and applied.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(applied.device)
        return self


def keep_rotary_float32(model: nn.Module) -> None:
    """Give every rotary module of a Hugging Face model :class:`Float32Buffers` as a base, in place."""
    for module in model.modules():
        if not isinstance(module, Float32Buffers) and any("inv_freq" in name for name in module._buffers):
            kind: Any = type(module)
            module.__class__ = _with_float32_buffers(kind)


@cache
def _with_float32_buffers(kind: Any) -> Any:
    return type(kind.__name__, (Float32Buffers, kind), {})
