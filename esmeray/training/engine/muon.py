"""Muon for the matrices of the layers, AdamW for all other parameters, in one optimizer that DeepSpeed can cut.

Jordan et al. 2024 (Muon: an optimizer for hidden layers): the update is the momentum made orthogonal by Newton-Schulz.

torch.optim.Muon (2.13) takes whole matrices alone, and ZeRO-1 and 2 hand an optimizer a worker's part of a vector of
all of them. DeepSpeed's Muon (0.19.8) takes the gradients' norm, by which it clips, after it has made them orthogonal,
and keeps the whole momentum of a matrix on each worker that has a part of it, so that no other number of workers could
resume. Here momentum is a vector cut like the weights', and the workers that have a matrix in parts add these up first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esmeray.model.parameter_groups import MATRICES
from esmeray.training.engine.zero import ClippingAdamW

MOMENTUM = "momentum"
"""Key of a group: the decay rate of Muon's momentum."""

_BUFFER = "momentum_buffer"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
"""As the two before it, Jordan's and torch's."""


class _Span(NamedTuple):
    """A matrix beside a worker's part of a vector: where it begins, also before or after the part; in parts itself."""

    shape: torch.Size
    start: int
    is_cut: bool


class ClippingMuon(ClippingAdamW):
    """Muon for groups with :data:`MATRICES`, AdamW for the others; clips, and leaves updates out, as the base does.

    ``product_dtype``: of Newton-Schulz's products. torch's are in bf16 always, which rounds what two workers add up to
    a thousandth, and takes thirty times as long on a processor without instructions for it.
    """

    def __init__(self, groups: list[dict[str, Any]], product_dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._product_dtype = product_dtype
        self._spans: dict[Tensor, list[_Span]] = {}
        self._add_up: Callable[[Tensor], Any] = lambda tensor: None

    def cut_by(self, zero: Any, rank: int) -> None:
        """Note where each matrix lies, once DeepSpeed's ZeRO-1 or 2 has made of each group a part of a vector."""
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
                # Parts are cut by length alone, so that a matrix may end in another worker's.
                is_cut = offset // length != (offset + matrix.numel() - 1) // length
                spans.append(_Span(matrix.shape, offset - rank * length, is_cut))
            self._spans[part] = spans

    def update(self) -> None:
        # torch's AdamW updates all groups that it sees.
        groups = self.param_groups
        self.param_groups = [group for group in groups if MATRICES not in group]
        super().update()
        self.param_groups = groups
        for group in groups:
            if MATRICES in group:
                for parameter in group["params"]:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update the matrices of a parameter: itself, or those of which its vector has parts."""
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
            # Also without a part of it: the others wait in the collective.
            if span.is_cut or start < stop:
                self._update_part(weights[own], momentum[own], gradients[own], span, start - span.start, group)

    def _update_part(
        self, weights: Tensor, momentum: Tensor, gradients: Tensor, span: _Span, begin: int, group: dict[str, Any]
    ) -> None:
        """Update a worker's part of a matrix, which begins at element ``begin`` of it."""
        applied: Tensor | float = 1.0
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            applied = 1 - found_inf
            # Chosen, not multiplied by 0, which leaves a NaN a NaN; on the device, so that no host waits.
            gradients = torch.where(found_inf > 0, 0.0, gradients / self.grad_scale)
        momentum.lerp_(gradients, (1 - group[MOMENTUM]) * applied)
        # Nesterov's momentum, as in Jordan's.
        update = gradients.lerp(momentum, group[MOMENTUM])
        if span.is_cut:
            whole = update.new_zeros(span.shape.numel())
            whole[begin : begin + update.numel()] = update
            self._add_up(whole)
            update = whole
        if weights.numel():
            orthogonal = orthogonalized(update.view(span.shape), self._product_dtype).reshape(-1)
            # Decoupled from the gradient, as AdamW's decay is.
            weights.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            weights.sub_(orthogonal[begin : begin + weights.numel()] * (group["lr"] * applied))


def orthogonalized(matrix: Tensor, product_dtype: torch.dtype) -> Tensor:
    """A matrix (M, N) with its singular values brought near 1, times sqrt(max(1, M / N)) as Jordan scales it."""
    rows, columns = matrix.shape
    a, b, c = _COEFFICIENTS
    x = matrix.to(product_dtype)
    # Of the two Gram matrices the smaller.
    if rows > columns:
        x = x.T
    # Newton-Schulz converges from singular values of at most 1, which the Frobenius norm bounds.
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if rows > columns:
        x = x.T
    return x.to(matrix.dtype) * max(1.0, rows / columns) ** 0.5
