"""Batches through a model on one device, one ahead: the loop of inference, and of features that training caches.

In: indices of the inputs of each batch, and a function that launches batches. Out: their tensors on the host. What a
batch is made of, and what is computed, is the caller's.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from esmeray.common.errors import ResourceError
from esmeray.model.device import HostCopy, is_out_of_memory

Indices = NDArray[np.int64]


class ForwardLoop:
    """See the module.

    Args:
        device: where ``launch`` computes.
        launch: tensors on the device of each of these batches; it should not wait for the device.
        name: of the input at an index, and its size in words, for the message where it alone is out of memory.
        at_once: batches that are launched together.

    Attributes:
        splits: batches that were halved because the device was out of memory.
    """

    def __init__(
        self,
        device: torch.device,
        launch: Callable[[Sequence[Indices]], Sequence[Mapping[str, Tensor]]],
        name: Callable[[int], str],
        at_once: int = 1,
    ) -> None:
        self.splits = 0
        self._device, self._launch, self._name, self._at_once = device, launch, name, at_once

    def run(self, batches: Iterable[Indices]) -> Iterator[tuple[Indices, dict[str, Tensor]]]:
        """Indices and tensors of each batch, on the host; two in place of one that was halved.

        Raises ResourceError where a single input is out of memory.
        """
        launched: deque[tuple[Indices, HostCopy]] = deque()
        remaining = iter(batches)
        while group := [*islice(remaining, self._at_once)]:
            launched.extend(self._launched(group))
            # Fetched only now that its successor is launched: the device computes while the host waits for the copy
            # and while the caller takes the rows. One is enough; each more would hold the outputs of a batch.
            while len(launched) > 1:
                yield _fetched(*launched.popleft())
        # Taken off first: what the caller works on is not held here beside it.
        while launched:
            yield _fetched(*launched.popleft())

    def _launched(self, group: Sequence[Indices]) -> list[tuple[Indices, HostCopy]]:
        """Batches on the device, in halves if they are out of memory."""
        try:
            results = self._launch(group)
            # Queued right behind the batch and not when it is read: the next batch stands in the queue by then.
            with record_function("copy back"):
                return [(indices, HostCopy(tensors)) for indices, tensors in zip(group, results, strict=True)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        # Outside of the except block: the error's traceback holds the tensors of the failed pass until it is left, and
        # what the allocator keeps of them in pieces of the wrong size must go back before the halves are tried.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if len(group) > 1:
            half = len(group) // 2
            return self._launched(group[:half]) + self._launched(group[half:])
        (indices,) = group
        if len(indices) == 1:
            raise ResourceError(
                f"{self._name(int(indices[0]))}: out of memory on a single sequence ({reason}); crop it, take it in "
                "windows, or use a device with more memory"
            )
        self.splits += 1
        # Halves that are still too large are halved again: memory in use elsewhere is nothing to calculate with.
        half = len(indices) // 2
        return self._launched([indices[:half]]) + self._launched([indices[half:]])


def each(
    launch: Callable[[Indices], Mapping[str, Tensor]],
) -> Callable[[Sequence[Indices]], Sequence[Mapping[str, Tensor]]]:
    """Launch batches one after the other."""
    return lambda group: [launch(indices) for indices in group]


def consecutive(count: int, at_once: int) -> Iterator[Indices]:
    """Batches of ``count`` inputs in their order, so many at once."""
    return (np.arange(start, min(start + at_once, count)) for start in range(0, count, at_once))


@record_function("copy back")
def _fetched(indices: Indices, copied: HostCopy) -> tuple[Indices, dict[str, Tensor]]:
    return indices, copied.read()
