"""Losses of the classifier, one value per target.

Losses take fp32 outputs and targets, and return the fp32 loss of each sequence or token. It is 0 without a gradient if
the target is ignored. With several columns it is the mean over known columns, weighted by label weights. Class weights
multiply the loss of a target. The divisor is the *number* of targets instead of torch's sum of weights, so that sums
are additive over workers.

Shape legend: M sequences or tokens, K classes or columns of labels.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from esmeray.common.errors import ConfigError
from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.model.backbones.base import Float32Buffers
from esmeray.model.heads.settings import loss_name
from esmeray.model.section import ClassifierSection


def balanced_class_weights(kind: TargetKind, blocks: Iterable[Tensor], num_classes: int) -> Tensor:
    """Return (K,) fp32 weights that make rare classes count as much as frequent ones.

    - Classes of sequences or residues: n / (K count), like scikit-learn's ``class_weight="balanced"``; 1 for a class
      without targets.
    - Multilabel targets: negatives / positives, a factor for the positives of the label; 1 if all targets of a label
      are equal.

    ``blocks``: blocks of training targets, (M,) int64 or (M, K) float; ignored targets are left out. Raises ConfigError
    for regression, which has no classes.
    """
    if kind == "regression":
        raise ConfigError("model.classifier.class_weights: regression has no classes; set it to none")
    if kind == "multilabel":
        # Sum block by block, because with thousands of terms the targets of all records may not fit into memory.
        counts_2K = sum(torch.stack([(targets > 0.5).sum(0), (targets <= 0.5).sum(0)]) for targets in blocks)
        positives_K, negatives_K = torch.as_tensor(counts_2K).double()
        return torch.where((positives_K > 0) & (negatives_K > 0), negatives_K / positives_K, 1.0).float()
    counted = (torch.bincount(targets[targets != IGNORED_TARGET], minlength=num_classes) for targets in blocks)
    counts_K = torch.as_tensor(sum(counted)).double()
    return torch.where(counts_K > 0, counts_K.sum() / (num_classes * counts_K), 1.0).float()


class TargetLoss(Float32Buffers):
    """Loss chosen by the settings, with weights of classes and labels (K,), or None for equal weights.

    The weights are not part of the saved state, because they are computed from the training records and a file. Raises
    ConfigError if the settings don't match the kind of targets.
    """

    class_weights: Tensor | None
    label_weights: Tensor | None

    def __init__(
        self,
        section: ClassifierSection,
        kind: TargetKind,
        class_weights: Tensor | None = None,
        label_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.section, self.kind, self.name = section, kind, loss_name(section, kind)
        for name, weights in (("class_weights", class_weights), ("label_weights", label_weights)):
            # A copy, because a buffer is moved and cast, which must not change the caller's tensor.
            self.register_buffer(name, None if weights is None else weights.detach().float().clone(), persistent=False)

    def forward(self, outputs_MK: Tensor, targets: Tensor) -> Tensor:
        """Return (M,) fp32 losses, 0 for ignored targets. ``targets``: (M,) int64, or (M, K) float32."""
        if self.name == "mse":
            return _mean_of_known((outputs_MK - _filled(targets)).square(), targets)
        gamma = self.section.focal_gamma if self.name == "focal" else None
        if self.kind == "multilabel":
            return _mean_of_known(
                _label_losses(outputs_MK, targets, self.class_weights, gamma), targets, self.label_weights
            )
        return _class_losses(outputs_MK, targets, self.class_weights, gamma, self.section.label_smoothing)


def _class_losses(
    logits_MK: Tensor, targets_M: Tensor, class_weights: Tensor | None, gamma: float | None, label_smoothing: float
) -> Tensor:
    """Return (M,) focal losses -w (1 - p)^gamma log p for p of the true class (Lin et al. 2017, equation 5).

    Without ``gamma``, return cross entropy with ``label_smoothing`` (Szegedy et al. 2016).
    """
    if gamma is None:
        return functional.cross_entropy(
            logits_MK,
            targets_M,
            weight=class_weights,
            ignore_index=IGNORED_TARGET,
            label_smoothing=label_smoothing,
            reduction="none",
        )
    # Without torch's class weights, which would change p in the focal factor.
    surprise_M = functional.cross_entropy(logits_MK, targets_M, ignore_index=IGNORED_TARGET, reduction="none")
    losses_M = _focal_weight(surprise_M, gamma) * surprise_M
    # clamp for indexing: an ignored target is -100, and its loss is 0 with any weight.
    return losses_M if class_weights is None else losses_M * class_weights[targets_M.clamp(min=0)]


def _label_losses(
    logits_MK: Tensor, targets_MK: Tensor, positive_weights: Tensor | None, gamma: float | None
) -> Tensor:
    """Return (M, K) cross entropies or focal losses of single labels; undefined for unknown labels."""
    filled_MK = _filled(targets_MK)
    if gamma is None:
        return functional.binary_cross_entropy_with_logits(
            logits_MK, filled_MK, pos_weight=positive_weights, reduction="none"
        )
    surprise_MK = functional.binary_cross_entropy_with_logits(logits_MK, filled_MK, reduction="none")
    losses_MK = _focal_weight(surprise_MK, gamma) * surprise_MK
    return losses_MK if positive_weights is None else losses_MK * (1 + (positive_weights - 1) * filled_MK)


def _focal_weight(surprise: Tensor, gamma: float) -> Tensor:
    """Return (1 - p)^gamma from -log p."""
    # expm1, because 1 - exp(-x) rounds to 0 for small x, and the gradient of nearly right predictions would vanish.
    # clamp, because a power below 1 has no derivative at 0, to which fp32 rounds values below 1e-8.
    return torch.expm1(-surprise).neg().clamp(min=1e-8).pow(gamma)


def _filled(targets_MK: Tensor) -> Tensor:
    """Replace NaN in the targets with 0, because NaN would reach the gradients."""
    return torch.where(targets_MK.isnan(), 0.0, targets_MK)


def _mean_of_known(losses_MK: Tensor, targets_MK: Tensor, weights_K: Tensor | None = None) -> Tensor:
    """Return (M,) means over columns with a known target, weighted if there are weights; 0 if no column counts."""
    shares_MK = ~targets_MK.isnan() * (1.0 if weights_K is None else weights_K)
    total_M = shares_MK.sum(-1)
    # torch.where before the product, because the loss of an unknown column may be infinite.
    losses_M = (torch.where(shares_MK > 0, losses_MK, 0.0) * shares_MK).sum(-1)
    return losses_M / torch.where(total_M > 0, total_M, 1.0)


def probabilities(logits: Tensor, kind: TargetKind) -> Tensor:
    """Return fp32 probabilities of logits (..., C), in the same shape; for regression, the numbers themselves."""
    logits = logits.float()
    if kind == "regression":
        return logits
    return logits.sigmoid() if kind == "multilabel" else logits.softmax(-1)
