"""Sequence classification: a class, several labels or numbers for each sequence, or a class for each residue.

In: packed batches with the targets of the label space's kind. Out: outputs in fp32, and their loss summed over the
targets (sequences, or residues), each multiplied by the weights of its class and sequence; the divisor is the *number*
of targets, so that weights that are 1 on average leave the learning rate as it is. Shares of right answers are
unweighted. Numbers are learnt, and their loss is counted, in units of their own standard deviation.

Shape legend: T tokens in the batch, N sequences, M targets' rows (N, or T for ``per_residue``), D channels of the
backbone, K outputs.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esmeray.dataset.labels.label_space import LabelSpace, predicted_positive
from esmeray.dataset.packed_batch import FEATURES, WEIGHTS, PackedBatch
from esmeray.dataset.targets import has_target
from esmeray.dataset.tokens.base import SequenceTokenizer
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.loading import build_backbone, drawn
from esmeray.model.backbones.lora import adapt
from esmeray.model.heads.heads import LightAttention, build_head
from esmeray.model.heads.losses import TargetLoss
from esmeray.model.heads.normalization import Normalization
from esmeray.model.heads.pooling import first_token, last_token, max_over_residues, mean_over_residues
from esmeray.model.heads.settings import check_pooling
from esmeray.model.section import ClassifierSection
from esmeray.model.task_model import TaskModel, TaskOutput, scalar_sums
from esmeray.tasks.section import ModelSection

_LEAST_VARIATION = 1e-12
"""Least share of a column's sum of squares that its sum about the mean is: below it there is rounding alone."""


class LabelModel(TaskModel):
    """A head that gives outputs of a label space, and their loss; what its inputs are a subclass says."""

    task = "classifier"

    saved_apart = ("backbone.", "target_scale.")

    def add_head(
        self,
        section: ClassifierSection,
        label_space: LabelSpace,
        channels: int,
        class_weights: Tensor | None = None,
        target_scale: tuple[Tensor, Tensor] | None = None,
        label_weights: Tensor | None = None,
        *,
        light_attention: bool = False,
    ) -> None:
        """Add head and loss, after the modules that give the head its ``channels``.

        A model's order of parameters is that of the optimizer's state in a checkpoint, and of the random weights.

        ``class_weights``: (K,) of the classes, or of multilabel's positives, ``label_weights``: (K,) of multilabel's
        labels; None counts all alike. ``target_scale``: (K,) means and standard deviations of a regression's training
        targets; None for 0 and 1.
        """
        self.section = section
        self.label_space = label_space
        self.loss = TargetLoss(section, label_space.kind, class_weights, label_weights)
        self.head = build_head(section, channels, label_space.num_outputs, light_attention=light_attention)
        self.target_scale: Normalization | None = None
        if label_space.kind == "regression":  # a head learns temperatures of 40 to 80 degrees as fast as shares
            self.target_scale = Normalization(label_space.num_outputs, *(target_scale or ()))

    @property
    def per_residue(self) -> bool:
        return self.label_space.kind == "per_residue"

    @abstractmethod
    def logits(self, batch: PackedBatch) -> Tensor:
        """(N, K) fp32, or (T, K) for ``per_residue``: outputs, before any softmax or sigmoid."""

    def forward(self, batch: PackedBatch) -> TaskOutput:
        return self.output_of(self.logits(batch), batch)

    def output_of(self, outputs_MK: Tensor, batch: PackedBatch) -> TaskOutput:
        """Loss and metric sums of the outputs.

        The batch has targets: (N,) int64 classes, (N, K) float32 labels or numbers, or (T,) int64 classes of the
        residues; and maybe weights of the sequences. Raises ValueError (targets do not go with the label space).

        Metrics: ``targets`` and ``loss``. Classes: ``correct``. Multilabel: ``correct``, sequences of which every known
        label is right at a threshold of 0.5, and ``hits``, ``predicted`` and ``positives``, labels that are predicted
        and true, predicted, or true. Regression: ``values``, ``squared_error``, ``value_sum`` and ``value_square``,
        (K,) of known numbers.
        """
        targets = self._targets(batch, outputs_MK)
        # In units of the standard deviation: a column in degrees would drown one of shares.
        scale = self.target_scale or nn.Identity()
        losses_M = self.loss(scale(outputs_MK), scale(targets))
        weights_N = batch.by_sequence.get(WEIGHTS)
        # After the loss and before the sum; the number of targets, its divisor, stays as it is.
        if weights_N is not None:
            losses_M = losses_M * (weights_N[batch.segment_ids()] if self.per_residue else weights_N)
        known_M = has_target(targets)
        num_targets = known_M.sum()
        with torch.no_grad():
            sums = {"targets": num_targets.double(), "loss": losses_M.detach().sum(dtype=torch.float64)}
            sums |= self._metric_sums(outputs_MK.detach(), targets, known_M)
        return TaskOutput(losses_M.sum(), num_targets, sums)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss`` for each target, and by kind:

        Classes: ``accuracy``. Multilabel: ``accuracy``, the share of sequences with all labels right, and
        ``f1_micro`` over all labels, left out where none is predicted or true. Regression: ``mse`` over all numbers,
        and ``r2``, the mean over columns of 1 - SSE / SST, left out if a column does not vary.
        """
        values = scalar_sums(sums)
        count = values["targets"]
        if count == 0:
            return {}
        metrics = {"loss": values["loss"] / count}
        if "correct" in values:
            metrics["accuracy"] = values["correct"] / count
        if "hits" in values and values["predicted"] + values["positives"]:
            metrics["f1_micro"] = 2 * values["hits"] / (values["predicted"] + values["positives"])
        return metrics | (_number_metrics(sums) if "squared_error" in sums else {})

    def own_state(self) -> dict[str, Tensor]:
        """Weights learnt beside the backbone; the scale of numbers is taken into the last layer."""
        state = super().own_state()
        if self.target_scale is not None:
            # So that the head alone gives numbers in their own units, also to who opens the folder without Esmeray.
            names = "head.output.weight", "head.output.bias"
            weight_KD, bias_K = self.target_scale.folded(*(state[name] for name in names))
            state |= dict(zip(names, (weight_KD, bias_K), strict=True))
        return state

    def _targets(self, batch: PackedBatch, outputs_MK: Tensor) -> Tensor:
        targets = batch.targets
        by_column = self.label_space.kind in ("multilabel", "regression")
        wanted = outputs_MK.shape if by_column else outputs_MK.shape[:1]
        # torch would broadcast or cast, and train on something else without a word.
        if targets.shape != wanted or targets.is_floating_point() != by_column:
            raise ValueError(
                f"targets of {self.label_space.kind} must be {'float32' if by_column else 'int64'} of shape "
                f"{tuple(wanted)}, not {targets.dtype} of {tuple(targets.shape)}"
            )
        return targets

    def _metric_sums(self, outputs_MK: Tensor, targets: Tensor, known_M: Tensor) -> dict[str, Tensor]:
        if self.label_space.kind == "regression":
            return _number_sums(outputs_MK, targets)
        if self.label_space.kind == "multilabel":
            return _label_sums(outputs_MK, targets, known_M)
        return {"correct": (outputs_MK.argmax(-1) == targets).sum().double()}


class Classifier(LabelModel):
    """A backbone, a pooling and a head, with the weights and scales of :meth:`LabelModel.add_head`.

    Raises ConfigError (pooling or loss do not go with targets, tokenizer or backbone).
    """

    backbone: PackedBackbone

    def __init__(
        self,
        backbone: PackedBackbone,
        section: ClassifierSection,
        label_space: LabelSpace,
        class_weights: Tensor | None = None,
        target_scale: tuple[Tensor, Tensor] | None = None,
        *,
        label_weights: Tensor | None = None,
        num_prefix: int = 1,
        num_suffix: int = 1,
    ) -> None:
        super().__init__()
        # Here and not with the settings: tokenizer and backbone are known only now.
        check_pooling(section, label_space.kind, num_prefix=num_prefix, causal=backbone.causal)
        self.num_prefix, self.num_suffix = num_prefix, num_suffix
        self.backbone = backbone
        self.light_attention: LightAttention | None = None
        channels = backbone.hidden_size
        attentive = section.pooling == "light_attention"
        if attentive:
            self.light_attention = LightAttention(
                channels, section.light_attention_kernel, section.dropout, num_prefix, num_suffix
            )
            channels *= 2  # the weighted mean and the maximum, side by side
        self.add_head(
            section, label_space, channels, class_weights, target_scale, label_weights, light_attention=attentive
        )

    def predict(self, batch: PackedBatch) -> tuple[Tensor, TaskOutput]:
        """Results of :meth:`logits` and :meth:`forward`, from one pass through the backbone."""
        outputs_MK = self.logits(batch)
        return outputs_MK, self.output_of(outputs_MK, batch)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(N, K) fp32, or (T, K) for ``per_residue``: outputs, before any softmax or sigmoid.

        The backbone is not run where the batch brings features: (T, D) of the tokens; or (N, D), pooled by :meth:`pool`
        without weights. Raises ValueError (the head takes no pooled ones).
        """
        # Stored features come pooled where pooling has no weights, which is one row a sequence to read and to keep.
        features_MD = batch.by_sequence.get(FEATURES)
        if features_MD is None:
            features_MD = batch.by_token.get(FEATURES)
            if features_MD is None:
                features_MD = self.backbone(batch)
            if not self.per_residue:
                features_MD = self.pool(features_MD, batch)
        elif self.per_residue or self.light_attention is not None:
            raise ValueError("features of sequences were given, but this head takes those of tokens")
        outputs_MK = self.head(features_MD)
        return outputs_MK if self.target_scale is None else self.target_scale.inverse(outputs_MK)

    def pool(self, features_TD: Tensor, batch: PackedBatch) -> Tensor:
        """(N, D) fp32, or (N, 2 D) for light attention: one vector for each sequence, from (T, D)."""
        if self.light_attention is not None:
            return self.light_attention(features_TD, batch)
        pooling = self.section.pooling
        if pooling == "cls":
            return first_token(features_TD, batch)
        if pooling == "last":
            return last_token(features_TD, batch)
        over_residues = max_over_residues if pooling == "max" else mean_over_residues
        return over_residues(features_TD, batch, self.num_prefix, self.num_suffix)


def _label_sums(logits_NK: Tensor, targets_NK: Tensor, known_N: Tensor) -> dict[str, Tensor]:
    positive_NK = targets_NK > 0.5
    # Unknown labels are neither predicted nor positive. A logit may be above 0 and its probability in fp32 still 0.5.
    predicted_NK = predicted_positive(logits_NK.sigmoid()) & ~targets_NK.isnan()
    wrong_N = (predicted_NK != positive_NK).any(-1)
    return {
        "correct": (known_N & ~wrong_N).sum().double(),
        "hits": (predicted_NK & positive_NK).sum().double(),
        "predicted": predicted_NK.sum().double(),
        "positives": positive_NK.sum().double(),
    }


def _number_sums(outputs_NK: Tensor, targets_NK: Tensor) -> dict[str, Tensor]:
    known_NK = ~targets_NK.isnan()
    # fp64 before the squares: r2 is a difference of sums that may agree in seven digits.
    values_NK = torch.where(known_NK, targets_NK, 0.0).double()
    errors_NK = torch.where(known_NK, outputs_NK.double() - values_NK, 0.0)
    return {
        "values": known_NK.sum(0).double(),
        "squared_error": errors_NK.square().sum(0),
        "value_sum": values_NK.sum(0),
        "value_square": values_NK.square().sum(0),
    }


def _number_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    counts_K, errors_K = sums["values"].double(), sums["squared_error"].double()
    metrics = {"mse": (errors_K.sum() / counts_K.sum()).item()}
    squares_K = sums["value_square"].double()
    variation_K = squares_K - sums["value_sum"].double().square() / counts_K
    if (variation_K > _LEAST_VARIATION * squares_K).all():  # false as well where a column has no number
        metrics["r2"] = (1 - errors_K / variation_K).mean().item()
    return metrics


def build_classifier(
    section: ModelSection,
    seed: int,
    label_space: LabelSpace,
    tokenizer: SequenceTokenizer,
    class_weights: Tensor | None = None,
    target_scale: tuple[Tensor, Tensor] | None = None,
    label_weights: Tensor | None = None,
    *,
    empty: bool = False,
) -> Classifier:
    """The classifier to train, in fp32 on the CPU, in training mode; ``empty``: on the meta device, to be counted.

    Random weights depend on ``seed`` alone; the global random state is left as it was. Raises as :class:`Classifier`,
    :func:`~esmeray.model.backbones.lora.adapt` and :func:`~esmeray.model.backbones.loading.build_backbone`.
    """
    backbone = build_backbone(section.backbone, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    with drawn(seed + 1, empty=empty):  # not the backbone's stream again
        adapt(backbone, section.backbone.lora)
        return Classifier(
            backbone,
            section.classifier,
            label_space,
            class_weights,
            target_scale,
            label_weights=label_weights,
            num_prefix=len(tokenizer.prefix),
            num_suffix=len(tokenizer.suffix),
        ).train()
