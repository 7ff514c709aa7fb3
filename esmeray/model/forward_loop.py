"""Loop that runs batches through a model on one device, one batch ahead, for inference and for cached features.

The caller passes the indices of the inputs of each batch, and a function that launches batches. The loop yields the
resulting tensors on the host. The caller defines the contents of a batch and the computation.
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
    """Loop over batches that splits a batch if the device is out of memory.

    Args:
        device: device on which ``launch`` computes.
        launch: function that returns the tensors of each given batch, on the device. It should not synchronize.
        name: function that describes the input at an index and its size, for the error if it alone is out of memory.
        at_once: number of batches that are launched together.

    Attributes:
        splits: number of batches that were halved because the device was out of memory.
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
        """Yield the indices and the host tensors of each batch. A halved batch gives two items.

        Raises ResourceError if a single input is out of memory.
        """
        launched: deque[tuple[Indices, HostCopy]] = deque()
        remaining = iter(batches)
        while group := [*islice(remaining, self._at_once)]:
            launched.extend(self._launched(group))
            # Fetch a batch only after the next one is launched, so that the device computes while the host waits for
            # the copy and while the caller uses the rows. One batch ahead is enough; more would hold more outputs.
            while len(launched) > 1:
                yield _fetched(*launched.popleft())
        # popleft before the yield, so that the queue does not keep the outputs that the caller works on.
        while launched:
            yield _fetched(*launched.popleft())

    def _launched(self, group: Sequence[Indices]) -> list[tuple[Indices, HostCopy]]:
        """Launch batches; if they are out of memory, launch their halves."""
        try:
            results = self._launch(group)
            # Queue the copy right after the batch. Later it would have to wait for the next batch.
            with record_function("copy back"):
                return [(indices, HostCopy(tensors)) for indices, tensors in zip(group, results, strict=True)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        # Outside the except block, because the traceback keeps the tensors of the failed pass alive. The allocator must
        # release its cached blocks, which have the wrong sizes, before the halves are tried.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if len(group) > 1:
            half = len(group) // 2
            return self._launched(group[:half]) + self._launched(group[half:])
        (indices,) = group
        if len(indices) == 1:
            raise ResourceError(
                f"{self._name(int(indices[0]))}: out of memory on a single sequence ({reason}); crop it, split "
                "it into windows, or use a device with more memory"
            )
        self.splits += 1
        # Halves that are still too large are halved again, because free memory can't be predicted.
        half = len(indices) // 2
        return self._launched([indices[:half]]) + self._launched([indices[half:]])


def one_by_one(
    launch: Callable[[Indices], Mapping[str, Tensor]],
) -> Callable[[Sequence[Indices]], Sequence[Mapping[str, Tensor]]]:
    """Return a function that launches batches one after the other."""
    return lambda group: [launch(indices) for indices in group]


def consecutive(count: int, at_once: int) -> Iterator[Indices]:
    """Indices of ``count`` inputs in order, in batches of ``at_once`` inputs."""
    return (np.arange(start, min(start + at_once, count)) for start in range(0, count, at_once))


@record_function("copy back")
def _fetched(indices: Indices, copied: HostCopy) -> tuple[Indices, dict[str, Tensor]]:
    return indices, copied.read()
