"""Losses of the classifier, one value for each target.

In: outputs in fp32 and targets. Out: fp32, the loss of each sequence or token, 0 without a gradient where its target is
ignored; of several columns, the mean over those that are known, weighted by the labels' weights. Class weights multiply
the loss of a target; the divisor stays the *number* of targets, not torch's sum of weights: sums add up over workers.

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
    """(K,) fp32 weights that make rare classes count as much as frequent ones.

    Classes of sequences or residues: n / (K count), as scikit-learn's ``class_weight="balanced"``. Labels of a
    multilabel target: negatives / positives, by which their positives are to be multiplied. 1 for a class without any
    target, and for a label of which all targets are alike. ``blocks``: targets of some training records each, (M,)
    int64 or (M, K) float; ignored ones are left out. Raises ConfigError (regression has no classes).
    """
    if kind == "regression":
        raise ConfigError("model.classifier.class_weights: regression has no classes: set it to none")
    if kind == "multilabel":
        # Block by block: targets of all records as one tensor may not fit where terms are thousands.
        counts_2K = sum(torch.stack([(targets > 0.5).sum(0), (targets <= 0.5).sum(0)]) for targets in blocks)
        positives_K, negatives_K = torch.as_tensor(counts_2K).double()
        return torch.where((positives_K > 0) & (negatives_K > 0), negatives_K / positives_K, 1.0).float()
    counted = (torch.bincount(targets[targets != IGNORED_TARGET], minlength=num_classes) for targets in blocks)
    counts_K = torch.as_tensor(sum(counted)).double()
    return torch.where(counts_K > 0, counts_K.sum() / (num_classes * counts_K), 1.0).float()


class TargetLoss(Float32Buffers):
    """The loss that a section means, with its weights of classes and labels (K,); None for all alike.

    The weights are no part of the saved state: they follow from the training records and a file. Raises ConfigError
    (the settings do not go with the kind).
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
            # A copy: a buffer moves and is cast, the caller's tensor must not.
            self.register_buffer(name, None if weights is None else weights.detach().float().clone(), persistent=False)

    def forward(self, outputs_MK: Tensor, targets: Tensor) -> Tensor:
        """(M,) fp32, the loss of each target, 0 where it is ignored. ``targets``: (M,) int64, or (M, K) float32."""
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
    """(M,) focal loss -w (1 - p)^gamma log p with p of the true class (Lin et al. 2017, equation 5).

    Without ``gamma`` cross entropy, with ``label_smoothing`` (Szegedy et al. 2016).
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
    # Without torch's weights, which would be inside of the focal factor.
    surprise_M = functional.cross_entropy(logits_MK, targets_M, ignore_index=IGNORED_TARGET, reduction="none")
    losses_M = _doubt(surprise_M, gamma) * surprise_M
    # clamp: an ignored target is -100, and its loss 0 whatever it is multiplied by.
    return losses_M if class_weights is None else losses_M * class_weights[targets_M.clamp(min=0)]


def _label_losses(
    logits_MK: Tensor, targets_MK: Tensor, positive_weights: Tensor | None, gamma: float | None
) -> Tensor:
    """(M, K) cross entropy or focal loss of each label alone; of no meaning where it is not known."""
    filled_MK = _filled(targets_MK)
    if gamma is None:
        return functional.binary_cross_entropy_with_logits(
            logits_MK, filled_MK, pos_weight=positive_weights, reduction="none"
        )
    surprise_MK = functional.binary_cross_entropy_with_logits(logits_MK, filled_MK, reduction="none")
    losses_MK = _doubt(surprise_MK, gamma) * surprise_MK
    return losses_MK if positive_weights is None else losses_MK * (1 + (positive_weights - 1) * filled_MK)


def _doubt(surprise: Tensor, gamma: float) -> Tensor:
    """(1 - p)^gamma from -log p."""
    # expm1: 1 - exp(-x) of a small x would be rounded to 0, and with it the gradient of answers that are nearly right.
    # clamp: below 1e-8 fp32 is 0, where a power under 1 has no derivative.
    return torch.expm1(-surprise).neg().clamp(min=1e-8).pow(gamma)


def _filled(targets_MK: Tensor) -> Tensor:
    """The targets with 0 for NaN, which would otherwise come back in the gradients."""
    return torch.where(targets_MK.isnan(), 0.0, targets_MK)


def _mean_of_known(losses_MK: Tensor, targets_MK: Tensor, weights_K: Tensor | None = None) -> Tensor:
    """(M,): the mean, weighted where there are weights, over the columns whose target is known; 0 where none counts."""
    shares_MK = ~targets_MK.isnan() * (1.0 if weights_K is None else weights_K)
    total_M = shares_MK.sum(-1)
    # where first: the loss of an unknown column is of no meaning, and may be infinite.
    losses_M = (torch.where(shares_MK > 0, losses_MK, 0.0) * shares_MK).sum(-1)
    return losses_M / torch.where(total_M > 0, total_M, 1.0)


def probabilities(logits: Tensor, kind: TargetKind) -> Tensor:
    """Probabilities of logits (..., C), fp32 of that shape; for regression the numbers themselves."""
    logits = logits.float()
    if kind == "regression":
        return logits
    return logits.sigmoid() if kind == "multilabel" else logits.softmax(-1)
