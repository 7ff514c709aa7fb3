"""Muon for the matrices of the layers, AdamW for all other parameters, in one optimizer that DeepSpeed can partition.

Jordan et al. 2024 (Muon: an optimizer for hidden layers): the update is the momentum, orthogonalized by Newton-Schulz
iterations.

The existing implementations can't be used:

- torch.optim.Muon (2.13) needs whole matrices. Under ZeRO-1 and 2 an optimizer gets the worker's part of one flat
  vector of all parameters.
- DeepSpeed's Muon (0.19.8) computes the gradient norm, for clipping, after orthogonalization. It also keeps the whole
  momentum of a matrix on each worker that has a part of it, so a different number of workers can't resume.

Here the momentum is a vector partitioned like the weights. If a matrix is split over workers, they first add up its
parts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esmeray.model.parameter_groups import MATRICES
from esmeray.training.engine.zero import ClippingAdamW

MOMENTUM = "momentum"
"""Key of a parameter group: decay rate of Muon's momentum."""
PEAK_MOMENTUM = 0.95

_BUFFER = "momentum_buffer"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
"""Newton-Schulz coefficients, iterations and epsilon of Jordan et al. and of torch."""


class _Span(NamedTuple):
    """Location of a matrix relative to a worker's part of the flat vector.

    ``start`` may lie before or after the part. ``is_cut``: the matrix is split over workers.
    """

    shape: torch.Size
    start: int
    is_cut: bool


class ClippingMuon(ClippingAdamW):
    """Muon for groups with :data:`MATRICES`, AdamW for the others. Clips and skips updates like the base class.

    ``product_dtype``: dtype of the Newton-Schulz products. torch always uses bf16, which rounds sums over two workers
    to a thousandth, and is thirty times slower on a processor without bf16 instructions.
    """

    def __init__(self, groups: list[dict[str, Any]], product_dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._product_dtype = product_dtype
        self._spans: dict[Tensor, list[_Span]] = {}
        self._add_up: Callable[[Tensor], Any] = lambda tensor: None

    def cut_by(self, zero: Any, rank: int) -> None:
        """Record the location of each matrix, after ZeRO-1 or 2 has made each group a part of a vector."""
        from deepspeed import comm

        self._add_up = lambda tensor: comm.all_reduce(tensor, group=zero.dp_process_group)
        layouts = zip(self.param_groups, zero.bit16_groups, zero.round_robin_bit16_offsets, strict=True)
        for group, matrices, offsets in layouts:
            if MATRICES not in group:
                continue
            (part,) = group["params"]
            length = part.numel()
            spans = []
            for matrix, offset in zip(matrices, offsets, strict=True):
                # Vectors are cut by length alone, so a matrix may end in another worker's part.
                is_cut = offset // length != (offset + matrix.numel() - 1) // length
                spans.append(_Span(matrix.shape, offset - rank * length, is_cut))
            self._spans[part] = spans

    def update(self) -> None:
        # torch's AdamW updates all groups that it sees, so hide the groups with matrices.
        groups = self.param_groups
        self.param_groups = [group for group in groups if MATRICES not in group]
        super().update()
        self.param_groups = groups
        for group in groups:
            if MATRICES in group:
                for parameter in group["params"]:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter's matrices: the parameter itself, or the matrices that its flat vector has parts of."""
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state[_BUFFER] = torch.zeros_like(parameter)
        state["step"] += 1
        weights, momentum, gradients = parameter.view(-1), state[_BUFFER].view(-1), parameter.grad.reshape(-1)
        for span in self._spans.get(parameter, [_Span(parameter.shape, 0, False)]):
            start, stop = max(span.start, 0), min(span.start + span.shape.numel(), parameter.numel())
            own = slice(start, max(start, stop))
            # Call it even if this worker has no part of a split matrix: the other workers wait in the collective.
            if span.is_cut or start < stop:
                self._update_part(weights[own], momentum[own], gradients[own], span, start - span.start, group)

    def _update_part(
        self, weights: Tensor, momentum: Tensor, gradients: Tensor, span: _Span, begin: int, group: dict[str, Any]
    ) -> None:
        """Update a worker's part of a matrix; the part starts at element ``begin`` of the matrix."""
        applied: Tensor | float = 1.0
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            applied = 1 - found_inf
            # Use torch.where: multiplying a NaN by 0 leaves a NaN. It runs on the device, so the host does not wait.
            gradients = torch.where(found_inf > 0, 0.0, gradients / self.grad_scale)
        momentum.lerp_(gradients, (1 - group[MOMENTUM]) * applied)
        # Nesterov momentum, as in Jordan et al.
        update = gradients.lerp(momentum, group[MOMENTUM])
        if span.is_cut:
            whole = update.new_zeros(span.shape.numel())
            whole[begin : begin + update.numel()] = update
            self._add_up(whole)
            update = whole
        if weights.numel():
            orthogonal = orthogonalized(update.view(span.shape), self._product_dtype).reshape(-1)
            # Weight decay is decoupled from the gradient, as in AdamW.
            weights.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            weights.sub_(orthogonal[begin : begin + weights.numel()] * (group["lr"] * applied))


def orthogonalized(matrix: Tensor, product_dtype: torch.dtype) -> Tensor:
    """Bring the singular values of a matrix (M, N) near 1 and scale it by sqrt(max(1, M / N)), as in Jordan et al."""
    rows, columns = matrix.shape
    a, b, c = _COEFFICIENTS
    x = matrix.to(product_dtype)
    # Use the smaller of the two Gram matrices.
    if rows > columns:
        x = x.T
    # Newton-Schulz converges if all singular values are at most 1. The Frobenius norm bounds them.
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if rows > columns:
        x = x.T
    return x.to(matrix.dtype) * max(1.0, rows / columns) ** 0.5
