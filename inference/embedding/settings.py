"""Settings of an embedding job, and the outputs that they mean for a model.

Nothing here needs torch, so that mistakes are reported at once. Shape legend: T tokens, R residues, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from common.errors import ConfigError
from dataset.embeddings.formats.base import Format
from dataset.embeddings.formats.registry import FORMATS, VectorFormat
from dataset.embeddings.manifest import Dtype, Per
from train_config.processor import computes_bf16

OutputName: TypeAlias = Literal["mean", "max", "cls", "residues", "logits", "contacts", "latents", "mean_latents"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
LongPolicy: TypeAlias = Literal["error", "crop", "window"]

OF_LAYERS = ("mean", "max", "cls", "residues")
"""Outputs that each of the layers has."""

CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 2_048, 65_536
"""On the CPU a small budget stays in the cache."""

_PER: dict[str, Per] = {"residues": "residue", "logits": "residue", "latents": "residue", "contacts": "pair"}
_WORDS = {
    "mean": "mean over the residues",
    "max": "maximum over the residues",
    "cls": "first token (<cls>)",
    "residues": "vector of each residue",
    "logits": "logits of the masked language model for each residue",
    "contacts": "probability of contact of each pair of residues, by the contact head of ESM-2",
    "latents": "latents of the autoencoder for each residue",
    "mean_latents": "mean of the autoencoder's latents over the residues",
}


class EmbeddingSettings(BaseModel):
    """Outputs, precision and limits, which the result depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outputs: list[OutputName] = Field(
        ["mean"],
        min_length=1,
        description="mean, max, cls: a vector a protein. residues, logits, latents (of an autoencoder): a vector a "
        "residue. contacts (ESM-2): a probability for each pair. mean_latents: the mean of latents.",
    )
    layers: list[int] = Field(
        [-1], min_length=1, description="Layers of mean, max, cls and residues: 0 the embeddings, -1 the last."
    )
    precision: Precision | None = Field(
        None, description="Of the computation. Default: bf16; fp32 on a processor without instructions for bf16."
    )
    dtype: Dtype = Field(
        "fp32", description="Precision of the files. bf16: of residues alone; int8: scaled by channel."
    )
    format: VectorFormat = Field(
        "parquet", description="Files of the vectors of proteins. hdf5 also holds outputs of residues and pairs."
    )
    hdf5_key: Literal["id", "hash"] = Field(
        "id", description="Names in HDF5: the id (with _ for /), or the hash by which biotrainer finds a sequence."
    )
    long: LongPolicy = Field(
        "error",
        description="Sequences of more than max_length residues: error; crop keeps the start; window averages "
        "overlapping windows over the residues.",
    )
    max_length: int | None = Field(
        None, gt=0, description="Residues. Default: what positions of the model reach, for ESM-2 any length."
    )
    overlap: int = Field(256, ge=0, description="Residues that neighbouring windows share.")
    batch_tokens: int | None = Field(
        None, gt=0, description="Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."
    )
    shard_tokens: int = Field(
        262_144, gt=0, description="Tokens of a shard, the unit that is written and computed again after a failure."
    )

    def resolved(self, on_cuda: bool) -> EmbeddingSettings:
        """The same with the defaults of the device."""
        budget = self.batch_tokens or (CUDA_BATCH_TOKENS if on_cuda else CPU_BATCH_TOKENS)
        precision = self.precision or ("bf16" if on_cuda or computes_bf16() else "fp32")
        return self.model_copy(update={"batch_tokens": budget, "precision": precision})


class Output(NamedTuple):
    """One output of a model.

    Attributes:
        name: unique, and its file's.
        kind: as asked for.
        layer: counted from 0, the embeddings; None for what has no layers.
        channels: values of a row.
    """

    name: str
    kind: OutputName
    layer: int | None
    channels: int

    @property
    def per(self) -> Per:
        """What has a row."""
        return _PER.get(self.kind, "protein")

    @property
    def description(self) -> str:
        """Words for the manifest."""
        layer = "" if self.layer is None else f", layer {self.layer}"
        special = "" if self.kind == "cls" else "; special tokens left out"
        return f"{_WORDS[self.kind]}{layer}{special}"


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that a job needs.

    Attributes:
        name: as given.
        fingerprint: of weights, architecture and tokenizer, hex.
        num_layers, hidden_size: of the backbone.
        outputs: in the order asked for.
        longest: residues of the longest sequence that can be taken; None for any.
        flops_per_token: of the matrix products of a forward pass.
        attention_flops: of attention in a forward pass, for a token and each token that it attends to.
        device_name: of the device that it is on.
        random_weights: drawn and not trained.
        cache_keys: fingerprint of the features of each output that can be cached.
    """

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    outputs: tuple[Output, ...]
    longest: int | None
    flops_per_token: float
    attention_flops: float
    device_name: str
    random_weights: bool
    cache_keys: dict[str, str]

    def flops(self, tokens_n: NDArray[np.integer]) -> float:
        """FLOP of a forward pass over sequences of so many tokens, nothing padded."""
        squares = float((tokens_n.astype(float) ** 2).sum())
        return self.flops_per_token * float(tokens_n.sum()) + self.attention_flops * squares


def outputs_of(settings: EmbeddingSettings, num_layers: int, channels: dict[str, int]) -> tuple[Output, ...]:
    """The outputs of a model with these channels, by the kind of output it has besides those of layers.

    Raises ConfigError where it has no such layer or output.
    """
    wrong = [layer for layer in settings.layers if not -num_layers - 1 <= layer <= num_layers]
    if wrong:
        raise ConfigError(f"--layers {wrong[0]}: the model has {num_layers} layers; 0 is the embeddings")
    layers = [layer % (num_layers + 1) for layer in settings.layers]
    found = []
    for kind in dict.fromkeys(settings.outputs):
        if kind not in channels:
            raise ConfigError(f"--outputs {kind}: this model has none; it has {', '.join(channels)}")
        if kind not in OF_LAYERS:
            found.append(Output(kind, kind, None, channels[kind]))
            continue
        for layer in dict.fromkeys(layers):
            name = kind if settings.layers == [-1] else f"{kind}_layer_{layer}"
            found.append(Output(name, kind, layer, channels[kind]))
    return tuple(found)


def format_of(settings: EmbeddingSettings, output: Output) -> Format:
    """Format of an output's files: what is no vector of a protein stays in shards, where the format can't hold it."""
    chosen = FORMATS[settings.format]
    return chosen if output.per in chosen.holds else FORMATS["safetensors"]


def check_settings(settings: EmbeddingSettings, outputs: tuple[Output, ...]) -> None:
    """Raise ConfigError for settings that don't go together."""
    for output in outputs:
        file_format = format_of(settings, output)
        if settings.dtype not in file_format.dtypes:
            known = ", ".join(file_format.dtypes)
            raise ConfigError(
                f"--dtype {settings.dtype}: {file_format.name}, the format of {output.name}, holds {known}; choose one "
                "of these, or another --format or --outputs"
            )
    if settings.long == "window" and any(output.kind == "contacts" for output in outputs):
        raise ConfigError("--outputs contacts: pairs of residues can't be averaged over windows; choose --long crop")
    if settings.long == "window" and settings.max_length is not None and settings.overlap >= settings.max_length:
        raise ConfigError(f"--overlap {settings.overlap}: must be less than --max-length {settings.max_length}")
