"""Settings of networks that tasks share: the backbone and its adapter, classifier heads, and structure encoders."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from esmeray.train_config.section import (
    END,
    PATH,
    PATH_OR_NAME,
    UNSEEN,
    Channels,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class LoraSection(Section):
    """Low-rank adaptation (Hu et al. 2022), implemented by peft."""

    rank: NonNegativeInt = 0
    """Rank of the update of each matrix; 0 disables LoRA."""
    alpha: PositiveFloat = 16.0
    """Scale of the update, which is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["attention"], min_length=1)
    """Layers to adapt: attention (its projections), all-linear, or names of modules."""
    export: Literal["merged", "adapter"] = "merged"
    """Weights to export. merged: backbone weights including the update; adapter: the update only, in peft's format."""


class BackboneSection(Section):
    """Network that computes a feature vector per token: ESM-2, ESM C or another encoder or decoder of transformers."""

    source: Annotated[str, PATH_OR_NAME] = "esm2_t6_8M"
    """Folder or run, its URI, or a hub name, whose weights are loaded. Or a model with random weights: a size of ESM-2
    (esm2_t6_8M, esm2_t12_35M, esm2_t30_150M, esm2_t33_650M, esm2_t36_3B, esm2_t48_15B), or esmc (ESM C), modernbert,
    bert, qwen2, llama or t5 with the size given by layers, hidden_size and heads."""
    layers: Channels | None = None
    """Number of layers (random weights only). Default: by the size."""
    hidden_size: Channels | None = None
    """Number of channels (random weights only). Default: by the size."""
    heads: Channels | None = None
    """Number of attention heads (random weights only). Default: by the size."""
    frozen: bool = False
    """Freeze the backbone and train only the layers after it."""
    padded: bool = False
    """Run the network on padded batches, for architectures without packed attention. T5 always uses padded batches,
    because its relative positions are a bias of the attention scores."""
    cache_features: bool = True
    """Compute the features of a frozen backbone once, keep them on disk, and train the classifier's head from them.
    Longer sequences must then be cropped at the start or at both ends, as set by data.crop."""
    lora: LoraSection = LoraSection()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Ratio of the learning rates of a layer and the layer after it; 1 gives all layers the same rate."""
    gradient_checkpointing: Annotated[bool | Literal["selective"], UNSEEN] = False
    """Recompute activations in the backward pass. true: recompute whole layers; activations take a fifteenth of the
    memory, a step takes a third more time. selective (ESM-2 only): keep matrix products and attention; activations take
    60 % of the memory, a step takes a few percent more time."""


class ClassifierSection(Section):
    """Head, loss and best-checkpoint metric of the classifier."""

    pooling: Literal["mean", "max", "cls", "last", "light_attention"] = "mean"
    """Pooling of a sequence's features to one vector. last is the last token, for decoders; light_attention is the
    pooling of Stärk et al. 2021."""
    head: Literal["linear", "mlp"] = "linear"
    """Layers of the head. linear: one layer; mlp: one hidden layer with GELU, or with ReLU and a normalization after
    light_attention."""
    hidden_size: Channels = 256
    """Channels of the mlp's hidden layer."""
    dropout: Share = 0.1
    """Dropout before each linear layer of the head."""
    light_attention_kernel: PositiveInt = 9
    """Kernel size of light attention's convolutions, in tokens."""
    label_smoothing: Share = 0.0
    """Share of the target that is spread over all classes (not for multilabel and regression)."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of classes. balanced: each class has the inverse of its share of the training records as weight; for
    multilabel targets, the positives of each label have the weight negatives / positives."""
    label_weights: Annotated[str | None, PATH] = None
    """TSV file of label and weight of its loss (multilabel). Missing labels have weight 1."""
    best_metric: str = "auto"
    """Validation metric that selects the best checkpoint. auto: mcc, f1_micro (multilabel) or spearman (regression)."""
    patience: Annotated[PositiveInt | None, END] = None
    """Number of evaluations without an improvement of best_metric after which training stops."""


class StructureEncoderSection(Section):
    """Network on the graph of nearest residues, like ProteinMPNN's encoder (Dauparas et al. 2022)."""

    source: Annotated[str | None, PATH_OR_NAME] = None
    """Trained weights of ProteinMPNN to start from: proteinmpnn, soluble or ca, also with a version
    (proteinmpnn/v_48_002), or a .pt file. They determine the size of the encoder. none: random weights."""
    frozen: bool = False
    """Freeze the encoder's weights that were loaded from source."""
    hidden_size: Channels = 128
    """Channels of the structure encoder."""
    layers: PositiveInt = 3
    """Number of message-passing layers."""
    neighbours: PositiveInt = 48
    """Number of nearest residues that send messages to a residue."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of channels that are dropped in training."""

    @model_validator(mode="after")
    def _source_has_the_size(self) -> Self:
        own = {"hidden_size", "layers", "neighbours", "dropout"} if self.source else {"frozen"}
        # Compare values: a stored config has all settings.
        wrong = sorted(own & self.model_dump(exclude_defaults=True).keys())
        if wrong:
            reason = "the weights of source determine the size" if self.source else "there is no source of weights"
            raise ValueError(f"{', '.join(wrong)} can't be set, because {reason}; remove it")
        return self
