"""Settings of the classifier: labels, tokenizer, adapter, pooling, head, loss and metrics."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.natures import END, PATH, UNSEEN
from esmeray.train_config.section import (
    Channels,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Tokens,
)

Part = Literal["all", "training", "validation", "test"]
TargetKind = Literal["multiclass", "binary", "multilabel", "regression", "per_residue"]


class LabelsSection(Section):
    """Labels of the source, for the classifier. Tables are CSV, TSV or Parquet; anything else is read as FASTA."""

    kind: TargetKind = "multiclass"
    """multiclass: one name of several; binary: one of two; multilabel: any number of names; regression: one or more
    numbers; per_residue: one letter for each residue, as in secondary structure, where '.', '?' and '-' mean not known:
    neither learnt nor scored."""
    header_pattern: str | None = None
    """FASTA: regular expression looked for in the whole header; its group 'label', or its first, is the label."""
    header_field: Annotated[int, Field(ge=1)] | None = None
    """FASTA: word of the header that is the label; the id is word 0."""
    labels_file: str | None = None
    """FASTA, per_residue: a FASTA file of the same ids, as biotrainer and FLIP have it, with a letter for each residue
    in place of the sequence."""
    mask_file: str | None = None
    """FASTA beside labels_file, with a 1 for each residue, or a 0 to neither learn nor score it."""
    id_column: str | None = None
    """Table: column of the ids. Default: row1, row2 ..."""
    text_column: str = "sequence"
    """Table: column of the sequence or text."""
    label_columns: list[str] = Field(["label"], min_length=1)
    """Table: columns of the labels. Several: one number each (regression), or one 0 or 1 each (multilabel)."""
    separator: str = Field(";", min_length=1)
    """Separator of the names of a multilabel target in one column or header."""
    weight_column: str | None = None
    """Table: column of the weight of each record in the loss."""
    split: Literal["hash", "stratified", "column", "files"] = "hash"
    """Choice of the held-out records. hash: data.validation_share of distinct sequences, by a hash; stratified: that
    share of each class; column: by split_column; files: validation_source."""
    split_column: str | None = None
    """Table: column of train, valid (or validation, val, dev) and test. labels_file: attribute of its headers with
    these values, such as SET of SET=train; VALIDATION=True turns train into valid."""
    validation_source: Annotated[list[str], UNSEEN] = Field([])
    """Labelled files to hold out, for split files."""
    unseen_labels: Literal["error", "skip"] = "error"
    """Labels of held-out records that no training record has. error: refuse; skip: leave these out, counted."""
    empty_texts: Literal["error", "skip"] = "error"
    """Records of a table without a sequence or text. error: refuse; skip: drop, counted."""
    missing_labels: Literal["error", "skip"] = "error"
    """Records without a label (empty, NaN). error: refuse; skip: drop, counted."""

    @model_validator(mode="after")
    def _fits_together(self) -> "LabelsSection":
        if self.header_pattern is not None and self.header_field is not None:
            raise ValueError("header_pattern and header_field can't both be set: remove one")
        if self.labels_file is not None and self.kind != "per_residue":
            raise ValueError(f"labels_file is for kind per_residue, not for {self.kind}")
        if self.labels_file is not None and (self.header_pattern, self.header_field) != (None, None):
            raise ValueError("labels_file and a place in the headers can't both be set: remove one")
        if self.mask_file is not None and self.labels_file is None:
            raise ValueError("mask_file goes with labels_file: set that, too, or remove it")
        if (self.split == "column") != (self.split_column is not None):
            raise ValueError("split column and split_column go together: set both or neither")
        if (self.split == "files") != bool(self.validation_source):
            raise ValueError(
                "split files and validation_source go together: set both or neither (none empties the list)"
            )
        if len(self.label_columns) > 1 and self.kind not in ("regression", "multilabel"):
            raise ValueError(f"label_columns: several are for regression and multilabel, not for {self.kind}")
        return self


class TokenizerSection(Section):
    """From texts to tokens."""

    source: str = "auto"
    """auto: that of the backbone's folder or hub name; for random weights the ESM alphabet for proteins, and 'train'
    for text. train: byte-pair encoding of the training texts. Else a local folder or a hub name."""
    vocabulary_size: Tokens = 4096
    """Tokens that 'train' makes, special ones included; fewer where the texts give no more."""
    content: Literal["protein", "text"] = "protein"
    """protein: residues, checked and upper-cased as for any store; text: anything in Unicode."""
    spaced: bool | Literal["auto"] = "auto"
    """Put blanks between residues, as ProtBERT wants. auto: where the vocabulary asks for it."""


class LoraSection(Section):
    """Low-rank adaptation (Hu et al. 2022), by peft."""

    rank: NonNegativeInt = 0
    """Rank of the update of each matrix; 0 adapts nothing."""
    alpha: PositiveFloat = 16.0
    """The update is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout before the update."""
    targets: list[str] = Field(["attention"], min_length=1)
    """Layers to adapt: attention (its projections), all-linear, or names of modules."""
    export: Literal["merged", "adapter"] = "merged"
    """merged: weights with the update in them; adapter: the update alone, as peft has it."""


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
    bootstrap: Annotated[PositiveInt, UNSEEN] = 1000
    """Resamplings for the confidence intervals of a report."""
