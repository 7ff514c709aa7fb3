"""Sequence classification: a class, several labels or numbers per sequence, or a class per residue.

The input is packed batches with targets of the label space's kind. The result is outputs in fp32 and their loss, summed
over the targets (sequences, or residues), each multiplied by the weights of its class and sequence. The divisor is the
*number* of targets, so that weights with mean 1 don't change the effective learning rate. Shares of correct answers are
unweighted. Numbers are learnt, and their loss is computed, in units of their standard deviation.

Shape legend: T tokens in the batch, N sequences, M targets' rows (N, or T for ``per_residue``), D channels of the
backbone, K outputs.
"""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.dataset.labels.label_space import LabelSpace, predicted_positive
from esmeray.dataset.packed_batch import FEATURES, WEIGHTS, PackedBatch
from esmeray.dataset.targets import has_target
from esmeray.dataset.tokens.base import SequenceTokenizer
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.loading import build_backbone, drawn
from esmeray.model.backbones.lora import adapt
from esmeray.model.heads.losses import TargetLoss
from esmeray.model.heads.normalization import Normalization
from esmeray.model.heads.pooling import LightAttention, first_token, last_token, max_over_residues, mean_over_residues
from esmeray.model.heads.settings import check_pooling
from esmeray.model.section import ClassifierSection
from esmeray.model.task_model import TaskModel, TaskOutput, scalar_sums
from esmeray.tasks.section import ModelSection

_MIN_VARIATION = 1e-12
"""Minimum ratio of a column's sum of squares about the mean to its sum of squares; below it there is only rounding."""


class Float32Linear(nn.Linear):
    """Linear layer that computes in fp32, whatever the dtype of its weights.

    In bf16, outputs would have two or three decimal digits, too few for regression.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias)


class CastingLinear(nn.Linear):
    """Linear layer that casts its input to the dtype of its weights, because pooled features are always fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


def build_head(
    section: ClassifierSection, channels: int, outputs: int, *, light_attention: bool = False
) -> nn.Sequential:
    """Build a module from (M, D) features of any dtype to (M, K) fp32 outputs, with or without a hidden layer.

    ``light_attention``: the features come from :class:`LightAttention`, which applies dropout before pooling. The
    hidden layer is then as in the paper: linear, dropout, ReLU, normalization. It normalizes rows instead of the batch,
    because the number of sequences of a packed batch varies, and includes fillers.
    """
    dropout = section.dropout
    # Named modules, because the code in a model card finds the weights of an export by these names.
    modules: dict[str, nn.Module] = {} if light_attention else {"dropout": nn.Dropout(dropout)}
    if section.head == "mlp":
        modules["hidden"] = CastingLinear(channels, section.hidden_size)
        channels = section.hidden_size
        if light_attention:
            modules |= {"hidden_dropout": nn.Dropout(dropout), "relu": nn.ReLU(), "norm": nn.LayerNorm(channels)}
        else:
            modules |= {"gelu": nn.GELU(), "hidden_dropout": nn.Dropout(dropout)}
    return nn.Sequential(OrderedDict(modules, output=Float32Linear(channels, outputs)))


class LabelModel(TaskModel):
    """A head that computes outputs of a label space, and their loss. Subclasses define the inputs."""

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
        """Add head and loss, after the modules that compute the head's ``channels``.

        The order of a model's parameters determines the optimizer state in a checkpoint and the random weights.

        ``class_weights``: (K,) weights of the classes, or of the positives of multilabel. ``label_weights``: (K,)
        weights of multilabel's labels. None: all equal. ``target_scale``: (K,) means and standard deviations of a
        regression's training targets; None for 0 and 1.
        """
        self.section = section
        self.label_space = label_space
        self.loss = TargetLoss(section, label_space.kind, class_weights, label_weights)
        self.head = build_head(section, channels, label_space.num_outputs, light_attention=light_attention)
        self.target_scale: Normalization | None = None
        if label_space.kind == "regression":  # so that degrees (40 to 80) are learnt as fast as shares
            self.target_scale = Normalization(label_space.num_outputs, *(target_scale or ()))

    @property
    def per_residue(self) -> bool:
        return self.label_space.kind == "per_residue"

    @abstractmethod
    def logits(self, batch: PackedBatch) -> Tensor:
        """Return outputs (N, K) in fp32, or (T, K) for ``per_residue``, before any softmax or sigmoid."""

    def forward(self, batch: PackedBatch) -> TaskOutput:
        return self.output_of(self.logits(batch), batch)

    def output_of(self, outputs_MK: Tensor, batch: PackedBatch) -> TaskOutput:
        """Compute the loss and metric sums of the outputs.

        The batch has targets: (N,) int64 classes, (N, K) float32 labels or numbers, or (T,) int64 classes of the
        residues. It may have weights of the sequences. Raises ValueError if the targets don't match the label space.

        Metrics, always ``targets`` and ``loss``:

        - Classes: ``correct``.
        - Multilabel: ``correct``, the number of sequences whose known labels are all right at a threshold of 0.5.
          ``hits``, ``predicted`` and ``positives``: labels that are predicted and true, predicted, or true.
        - Regression: ``values``, ``squared_error``, ``value_sum`` and ``value_square``, (K,) over known numbers.
        """
        targets = self._targets(batch, outputs_MK)
        # In units of the standard deviation: otherwise a column in degrees would dominate a column of shares.
        scale = self.target_scale or nn.Identity()
        losses_M = self.loss(scale(outputs_MK), scale(targets))
        weights_N = batch.by_sequence.get(WEIGHTS)
        # Weights apply after the loss and before the sum; the divisor stays the number of targets.
        if weights_N is not None:
            losses_M = losses_M * (weights_N[batch.segment_ids()] if self.per_residue else weights_N)
        known_M = has_target(targets)
        num_targets = known_M.sum()
        with torch.no_grad():
            sums = {"targets": num_targets.double(), "loss": losses_M.detach().sum(dtype=torch.float64)}
            sums |= self._metric_sums(outputs_MK.detach(), targets, known_M)
        return TaskOutput(losses_M.sum(), num_targets, sums)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ``loss`` per target, and other metrics by kind.

        - Classes: ``accuracy``.
        - Multilabel: ``accuracy``, the share of sequences with all labels right, and ``f1_micro`` over all labels.
          The latter is left out if no label is predicted or true.
        - Regression: ``mse`` over all numbers, and ``r2``, the mean over columns of 1 - SSE / SST. The latter is
          left out if a column does not vary.
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
        """Return all weights except the backbone's; the scale of numbers is folded into the last layer."""
        state = super().own_state()
        if self.target_scale is not None:
            # The head alone then outputs numbers in their own units, also for readers of the folder without Esmeray.
            names = "head.output.weight", "head.output.bias"
            weight_KD, bias_K = self.target_scale.folded(*(state[name] for name in names))
            state |= dict(zip(names, (weight_KD, bias_K), strict=True))
        return state

    def _targets(self, batch: PackedBatch, outputs_MK: Tensor) -> Tensor:
        targets = batch.targets
        by_column = self.label_space.kind in ("multilabel", "regression")
        wanted = outputs_MK.shape if by_column else outputs_MK.shape[:1]
        # Checked here: torch would silently broadcast or cast, and train on wrong targets.
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

    Raises ConfigError if the pooling doesn't suit the targets, the tokenizer or the backbone.
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
        # Checked here instead of in the settings: tokenizer and backbone are known only now.
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
            channels *= 2  # the weighted mean and the maximum, concatenated
        self.add_head(
            section, label_space, channels, class_weights, target_scale, label_weights, light_attention=attentive
        )

    def logits(self, batch: PackedBatch) -> Tensor:
        """Return outputs (N, K) in fp32, or (T, K) for ``per_residue``, before any softmax or sigmoid.

        If the batch contains features, the backbone is not run. They are (T, D) per token, or (N, D) pooled by
        :meth:`pool` without weights. Raises ValueError if the head can't take pooled features.
        """
        # If pooling has no weights, cached features are already pooled: one row per sequence to read and store.
        features_MD = batch.by_sequence.get(FEATURES)
        if features_MD is None:
            features_MD = batch.by_token.get(FEATURES)
            if features_MD is None:
                features_MD = self.backbone(batch)
            if not self.per_residue:
                features_MD = self.pool(features_MD, batch)
        elif self.per_residue or self.light_attention is not None:
            raise ValueError("expected features per token, found features per sequence")
        outputs_MK = self.head(features_MD)
        return outputs_MK if self.target_scale is None else self.target_scale.inverse(outputs_MK)

    def pool(self, features_TD: Tensor, batch: PackedBatch) -> Tensor:
        """Return one vector per sequence, (N, D) fp32 or (N, 2 D) for light attention, from features (T, D)."""
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
    # Unknown labels are neither predicted nor positive. Compare the probability, as it may round to 0.5 for a logit
    # above 0.
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
    # fp64 before squaring: r2 is a difference of sums that may agree in seven digits.
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
    if (variation_K > _MIN_VARIATION * squares_K).all():  # also false if a column has no number
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
    """Build the classifier to train, in fp32 on the CPU, in training mode; ``empty``: on the meta device, to count it.

    Random weights depend on ``seed`` only; the global random state is not changed. Raises as :class:`Classifier`,
    :func:`~esmeray.model.backbones.lora.adapt` and :func:`~esmeray.model.backbones.loading.build_backbone`.
    """
    backbone = build_backbone(section.backbone, seed, tokenizer.vocabulary_size, tokenizer.pad, empty=empty)
    backbone.use_final_norm()
    with drawn(seed + 1, empty=empty):  # a different random stream than the backbone's
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
