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

from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.model.backbones.base import Float32Buffers
from esmeray.model.section import ClassifierSection


def balanced_class_weights(kind: TargetKind, blocks: Iterable[Tensor], num_classes: int) -> Tensor:
    """Return (K,) fp32 weights that make rare classes count as much as frequent ones.

    - Classes of sequences or residues: n / (K count), like scikit-learn's ``class_weight="balanced"``; 1 for a class
      without targets.
    - Multilabel targets: negatives / positives, a factor for the positives of the label; 1 if all targets of a label
      are equal.

    ``blocks``: blocks of training targets, (M,) int64 or (M, K) float; ignored targets are left out.
    """
    if kind == "multilabel":
        # Sum block by block, because with thousands of terms the targets of all records may not fit into memory.
        counts_2K = sum(torch.stack([(targets > 0.5).sum(0), (targets <= 0.5).sum(0)]) for targets in blocks)
        positives_K, negatives_K = torch.as_tensor(counts_2K).double()
        return torch.where((positives_K > 0) & (negatives_K > 0), negatives_K / positives_K, 1.0).float()
    counted = (torch.bincount(targets[targets != IGNORED_TARGET], minlength=num_classes) for targets in blocks)
    counts_K = torch.as_tensor(sum(counted)).double()
    return torch.where(counts_K > 0, counts_K.sum() / (num_classes * counts_K), 1.0).float()


class TargetLoss(Float32Buffers):
    """Loss of a kind of targets, with weights of classes and labels (K,), or None for equal weights.

    It is cross entropy (Szegedy et al. 2016 for its label smoothing), binary cross entropy for multilabel targets, and
    the squared error for regression.

    The weights are not part of the saved state, because they are computed from the training records and a file. The
    plan has checked that the settings match the kind of targets.
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
        self.section, self.kind = section, kind
        for name, weights in (("class_weights", class_weights), ("label_weights", label_weights)):
            # A copy, because a buffer is moved and cast, which must not change the caller's tensor.
            self.register_buffer(name, None if weights is None else weights.detach().float().clone(), persistent=False)

    def forward(self, outputs_MK: Tensor, targets: Tensor) -> Tensor:
        """Return (M,) fp32 losses, 0 for ignored targets. ``targets``: (M,) int64, or (M, K) float32."""
        if self.kind == "regression":
            return _mean_of_known((outputs_MK - _filled(targets)).square(), targets)
        if self.kind == "multilabel":
            losses_MK = functional.binary_cross_entropy_with_logits(
                outputs_MK, _filled(targets), pos_weight=self.class_weights, reduction="none"
            )
            return _mean_of_known(losses_MK, targets, self.label_weights)
        return functional.cross_entropy(
            outputs_MK,
            targets,
            weight=self.class_weights,
            ignore_index=IGNORED_TARGET,
            label_smoothing=self.section.label_smoothing,
            reduction="none",
        )


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
