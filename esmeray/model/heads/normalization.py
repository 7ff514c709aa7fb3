"""Per-channel normalisation: of residue features, measured once before training, of vectors, and of learnt numbers.

Protein language models have a few channels of enormous activation, which would own a squared error taken over raw
features; CHEAP (Lu et al. 2024, bioRxiv 2024.08.06.606920, amyxlu/cheap-proteins) therefore rescales each channel
before compressing. Here by mean and standard deviation. The sums behind them are fp64 and additive: added up over
workers they give the same values for any number of workers.

Shape legend: T tokens, D channels.
"""

import torch
from torch import Tensor

from esmeray.common.errors import DataError
from esmeray.model.backbones.base import Float32Buffers


class FeatureStatistics:
    """Running fp64 sums of features, from which mean and scale of each channel follow.

    ``sums``: by name, () or (D,), to be added up over the workers.
    """

    def __init__(self, channels: int, device: torch.device | str = "cpu") -> None:
        sizes: dict[str, tuple[int, ...]] = {"count": (), "features": (channels,), "squares": (channels,)}
        self.sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    @torch.no_grad()
    def update(self, features_TD: Tensor, mask_T: Tensor) -> None:
        """Add the tokens at which ``mask_T`` is true."""
        # fp64 already here: the variance is a difference of sums that are far larger than it.
        counted_TD = torch.where(mask_T.unsqueeze(-1), features_TD, 0).double()
        self.sums["count"] += mask_T.sum()
        self.sums["features"] += counted_TD.sum(0)
        self.sums["squares"] += counted_TD.square().sum(0)

    def finalize(self) -> tuple[Tensor, Tensor]:
        """Mean and scale of each channel, (D,) fp32; the scale is the standard deviation, kept away from 0.

        Raises DataError (no token was seen, or a feature was not finite).
        """
        count = self.sums["count"]
        if not count.item():
            raise DataError("no residue to measure the feature normalisation from; the training data is empty")
        mean = self.sums["features"] / count
        # clamp: of a constant channel the difference may be below 0 by rounding.
        scale = (self.sums["squares"] / count - mean.square()).clamp_min(0).sqrt()
        if not (mean.isfinite().all() and scale.isfinite().all()):
            raise DataError("the backbone gives features that are not finite; check its weights or use bf16 or fp32")
        # A nearly constant channel must not become pure noise.
        floor = (scale.median() * 1e-3).clamp_min(1e-6)
        return mean.float(), torch.maximum(scale, floor).float()


class Normalization(Float32Buffers):
    """(x - mean) / scale for each channel or column, in fp32 whatever the precision of the model. Both are saved.

    ``mean``, ``scale``: (D,); 0 and 1 if left out.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, mean: Tensor | None = None, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels) if mean is None else mean.detach().float().clone())
        self.register_buffer("scale", torch.ones(channels) if scale is None else scale.detach().float().clone())

    @torch.no_grad()
    def set(self, statistics: FeatureStatistics) -> None:
        """Take over measured statistics."""
        mean, scale = statistics.finalize()
        # In place: the buffers stay where they are, and in fp32.
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) fp32, zero mean and unit variance over what was measured."""
        return (x_TD.float() - self.mean) / self.scale

    def inverse(self, normal_TD: Tensor) -> Tensor:
        """(T, D) fp32 in the unit of what was measured."""
        return normal_TD.float() * self.scale + self.mean

    def folded(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias of a linear layer that gives what it and :meth:`inverse` give one after the other."""
        return weight * self.scale[:, None], bias * self.scale + self.mean
