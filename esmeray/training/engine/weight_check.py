"""The weights compared over the workers: one whose memory or device changed a bit in silence is found and named.

Up to ZeRO-2 every worker has all weights, which are the same to the bit, as each gets the same update. Their integers
are added up by parameter on the device, and the sums, a few kilobytes, travel through the control group. A change in an
optimizer's state that is on one worker alone reaches the weights of all alike and is not seen.
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
"""By bytes of an element."""


class WeightsDifferError(ResourceError):
    """A worker's weights are not those of the others; training starts again from a checkpoint in which they were."""

    retryable = True


def weight_sums(parameters: Iterable[Tensor]) -> list[int]:
    """The sum of each parameter's bits, as integers of its element's size, modulo 2**64."""
    # Integers add up to the same in any order, and a bit changes any sum; one copy to the host for all parameters.
    sums = [p.detach().view(_INTEGERS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    return torch.stack(sums).tolist()


def differing_weights(model: nn.Module, control: ControlGroup) -> str | None:
    """The workers whose weights differ from those of most, in words; None where none do. Every worker calls it."""
    names = [name for name, _ in model.named_parameters()]
    workers = control.gather((socket.gethostname(), tuple(weight_sums(model.parameters()))))
    (usual, votes), *others = Counter(sums for _, sums in workers).most_common()
    if not others:
        return None
    # Of two workers nobody can say which is right.
    has_majority = 2 * votes > len(workers)
    named = [f"{rank} (on {host})" for rank, (host, sums) in enumerate(workers) if sums != usual or not has_majority]
    changed = [name for name, a, b in zip(names, usual, others[0][0], strict=True) if a != b]
    than = "those of most" if has_majority else "each other's"
    parameters = f"{counted(len(changed), 'parameter{s}')}, first {changed[0]}"
    return f"the weights of worker {', '.join(named)} are not {than}: {parameters}; its memory or device may be faulty"
