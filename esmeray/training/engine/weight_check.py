"""Compare the weights across workers, to find a worker whose memory or device silently changed a bit.

Up to ZeRO-2 every worker has all weights. They are bitwise equal, since each worker applies the same update. The device
adds up the bits of each parameter as integers, and the control group exchanges the sums, a few kilobytes. A changed
optimizer state that only one worker holds reaches the weights of all workers alike and is not detected.
"""

import socket
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from esmeray.cluster.collective import ControlGroup
from esmeray.common.errors import ResourceError
from esmeray.common.text import counted

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size in bytes."""


class WeightsDifferError(ResourceError):
    """Weights differ between workers; training restarts from a checkpoint with equal weights."""

    retryable = True


def weight_sums(parameters: Iterable[Tensor]) -> list[int]:
    """Return the sum of each parameter's bits, as integers of its element size, modulo 2**64."""
    # Integer sums do not depend on the order, and any flipped bit changes the sum. One copy to the host for all
    # parameters.
    sums = [p.detach().view(_INTEGERS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    return torch.stack(sums).tolist()


def differing_weights(model: nn.Module, control: ControlGroup) -> str | None:
    """Describe the workers whose weights differ from the majority's; None if all are equal. Every worker calls it."""
    names = [name for name, _ in model.named_parameters()]
    workers = control.gather((socket.gethostname(), tuple(weight_sums(model.parameters()))))
    (usual, votes), *others = Counter(sums for _, sums in workers).most_common()
    if not others:
        return None
    # Without a majority, e.g. with two workers, it is unknown which one is right.
    has_majority = 2 * votes > len(workers)
    named = [f"{rank} (on {host})" for rank, (host, sums) in enumerate(workers) if sums != usual or not has_majority]
    changed = [name for name, a, b in zip(names, usual, others[0][0], strict=True) if a != b]
    than = "most other workers" if has_majority else "each other"
    parameters = f"{counted(len(changed), 'parameter{s}')}, first {changed[0]}"
    return (
        f"the weights of worker {', '.join(named)} differ from {than}: {parameters}; the memory or device may be faulty"
    )
