"""A base for modules whose buffers must stay fp32 when the model is cast to bf16 or fp16.

``module.bfloat16()``, which training engines call, casts buffers too. Rotary frequencies in bf16 are off by up to
0.4 %, which at position 1000 is a turn of four radians; feature scales lose the same share.
"""

from __future__ import annotations

from collections.abc import Callable

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
