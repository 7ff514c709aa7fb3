"""Normalization per channel: of residue features, measured once before training, of vectors, and of targets.

Protein language models have a few channels with very large activations, which would dominate a squared error of raw
features. CHEAP (Lu et al. 2024, bioRxiv 2024.08.06.606920, amyxlu/cheap-proteins) therefore rescales each channel
before compression. Here channels are normalized by mean and standard deviation. The sums behind them are fp64 and
additive over workers, so that the result is the same for any number of workers.

Shape legend: T tokens, D channels.
"""

import torch
from torch import Tensor

from esmeray.common.errors import DataError
from esmeray.model.backbones.base import Float32Buffers


class FeatureStatistics:
    """Running fp64 sums of features, which give mean and scale of each channel.

    ``sums``: by name, () or (D,), to be summed over the workers.
    """

    def __init__(self, channels: int, device: torch.device | str = "cpu") -> None:
        sizes: dict[str, tuple[int, ...]] = {"count": (), "features": (channels,), "squares": (channels,)}
        self.sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    @torch.no_grad()
    def update(self, features_TD: Tensor, mask_T: Tensor) -> None:
        """Add the tokens for which ``mask_T`` is true."""
        # fp64 from here on, because the variance is a small difference of large sums.
        counted_TD = torch.where(mask_T.unsqueeze(-1), features_TD, 0).double()
        self.sums["count"] += mask_T.sum()
        self.sums["features"] += counted_TD.sum(0)
        self.sums["squares"] += counted_TD.square().sum(0)

    def finalize(self) -> tuple[Tensor, Tensor]:
        """Return mean and scale of each channel, (D,) fp32. The scale is the standard deviation, with a floor above 0.

        Raises DataError if no token was added, or if a feature was not finite.
        """
        count = self.sums["count"]
        if not count.item():
            raise DataError("no residues to compute the feature normalisation from; the training data is empty")
        mean = self.sums["features"] / count
        # clamp, because rounding may make the difference negative for a constant channel.
        scale = (self.sums["squares"] / count - mean.square()).clamp_min(0).sqrt()
        if not (mean.isfinite().all() and scale.isfinite().all()):
            raise DataError("the backbone returns features that are not finite; check its weights, or use bf16 or fp32")
        # The floor prevents that a nearly constant channel becomes noise.
        floor = (scale.median() * 1e-3).clamp_min(1e-6)
        return mean.float(), torch.maximum(scale, floor).float()


class Normalization(Float32Buffers):
    """Normalization (x - mean) / scale per channel or column, in fp32 whatever the precision of the model.

    ``mean``, ``scale``: (D,), saved with the model; 0 and 1 if left out.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, mean: Tensor | None = None, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels) if mean is None else mean.detach().float().clone())
        self.register_buffer("scale", torch.ones(channels) if scale is None else scale.detach().float().clone())

    @torch.no_grad()
    def set(self, statistics: FeatureStatistics) -> None:
        """Set mean and scale to measured statistics."""
        mean, scale = statistics.finalize()
        # In place, so that the buffers keep their device and dtype.
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D) fp32 with zero mean and unit variance over the measured tokens."""
        return (x_TD.float() - self.mean) / self.scale

    def inverse(self, normal_TD: Tensor) -> Tensor:
        """Return (T, D) fp32 in the original units."""
        return normal_TD.float() * self.scale + self.mean

    def folded(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a linear layer that is equivalent to the given one followed by :meth:`inverse`."""
        return weight * self.scale[:, None], bias * self.scale + self.mean
