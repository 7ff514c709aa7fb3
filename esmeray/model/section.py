"""Settings of networks that several tasks share: the backbone and its adapter, heads on its features, structures."""

from typing import Annotated, Literal

from pydantic import Field

from esmeray.train_config.natures import END, PATH, PATH_OR_NAME, UNSEEN
from esmeray.train_config.section import (
    Channels,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class LoraSection(Section):
    """Low-rank adaptation (Hu et al. 2022), by peft."""

    rank: NonNegativeInt = 0
    """Rank of the update of each matrix; 0 adapts nothing."""
    alpha: PositiveFloat = 16.0
    """The update is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout before the update."""
    targets: list[str] = Field(default=["attention"], min_length=1)
    """Layers to adapt: attention (its projections), all-linear, or names of modules."""
    export: Literal["merged", "adapter"] = "merged"
    """merged: weights with the update in them; adapter: the update alone, as peft has it."""


class BackboneSection(Section):
    """Network that gives each token a feature vector: ESM-2, ESM C or another encoder or decoder of transformers."""

    source: Annotated[str, PATH_OR_NAME] = "esm2_t6_8M"
    """Folder, run, URI of one, or hub name (weights are loaded), or a size with random weights: esm2_t6_8M,
    esm2_t12_35M, esm2_t30_150M, esm2_t33_650M, esm2_t36_3B, esm2_t48_15B; or esmc (ESM C), modernbert, bert, qwen2,
    llama or t5 with random weights of the size given by layers, hidden_size and heads."""
    layers: Channels | None = None
    """Layers, in place of the size's own (random weights only)."""
    hidden_size: Channels | None = None
    """Channels, in place of the size's own (random weights only)."""
    heads: Channels | None = None
    """Attention heads, in place of the size's own (random weights only)."""
    frozen: bool = False
    """Train only what comes after the backbone."""
    padded: bool = False
    """Give the network padded batches, for architectures that packed attention does not know. T5 always gets them: its
    relative positions are a bias of the scores."""
    cache_features: bool = True
    """Compute the features of a frozen backbone once, keep them on disk and train the classifier's head from them.
    Longer sequences must then be cropped at the start or ends, as data.crop says."""
    lora: LoraSection = LoraSection()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each layer learns at this share of the rate of the one after it; 1 is the same rate for all."""
    gradient_checkpointing: Annotated[bool | Literal["selective"], UNSEEN] = False
    """Recompute activations in the backward pass. true: all of a layer, for a fifteenth of their memory and a third
    more time; selective, for ESM-2: all but matrix products and attention, for 60 % of the memory, in a few percent
    more time."""


class ClassifierSection(Section):
    """The classifier's head, loss and choice of the best checkpoint."""

    pooling: Literal["mean", "max", "cls", "last", "light_attention"] = "mean"
    """Pooling of a sequence's features to one vector; last is the last token, for decoders; light_attention is that of
    Stärk et al. 2021."""
    head: Literal["linear", "mlp"] = "linear"
    """linear, or one hidden layer: with GELU, or after light_attention with ReLU and a normalisation."""
    hidden_size: Channels = 256
    """Channels of the mlp's hidden layer."""
    dropout: Share = 0.1
    """Dropout before each linear layer of the head."""
    light_attention_kernel: PositiveInt = 9
    """Tokens that light attention's convolutions span."""
    loss: Literal["auto", "cross_entropy", "focal", "bce", "mse"] = "auto"
    """auto: cross_entropy, bce (multilabel) or mse (regression, in units of the targets' standard deviation). focal is
    for classes of any kind (Lin 2017)."""
    label_smoothing: Share = 0.0
    """Share of the target spread over all classes (cross_entropy)."""
    focal_gamma: NonNegativeFloat = 2.0
    """Focal loss: exponent of 1 - probability; the higher, the less do confident predictions count."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: each class counts by the inverse of its share of the training records; of multilabel targets the
    positives of each label, by negatives / positives."""
    label_weights: Annotated[str | None, PATH] = None
    """TSV of label and weight, by which each label's loss counts (multilabel); labels that it lacks count 1."""
    best_metric: str = "auto"
    """Metric of the validation that chooses the best checkpoint. auto: mcc, f1_micro (multilabel) or spearman
    (regression)."""
    patience: Annotated[PositiveInt | None, END] = None
    """Evaluations without a better best_metric after which training stops."""


class StructureEncoderSection(Section):
    """Network on the graph of near residues, as ProteinMPNN's encoder (Dauparas et al. 2022)."""

    hidden_size: Channels = 128
    """Channels of the structure encoder."""
    layers: PositiveInt = 3
    """Layers of messages between neighbouring residues."""
    neighbours: PositiveInt = 48
    """Nearest residues that each one gets messages from."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of channels dropped in training."""
