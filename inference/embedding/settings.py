"""Settings of an embedding job, and the outputs that they mean for a model.

Nothing here needs torch, so that mistakes are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from common.errors import ConfigError
from common.processor import computes_bf16
from dataset.embeddings.formats.base import Format
from dataset.embeddings.formats.registry import FORMATS, VectorFormat
from dataset.embeddings.manifest import Dtype
from inference.models.facts import ModelFacts, Output
from train_config.section import Precision

LongPolicy: TypeAlias = Literal["error", "crop", "window"]

CPU_TOKENS, CUDA_TOKENS = 2_048, 65_536
"""On the CPU a small budget stays in the cache."""


class EmbeddingSettings(BaseModel):
    """Outputs, precision and limits, which the result depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outputs: list[str] = Field(
        ["mean"],
        min_length=1,
        description="mean, max, cls: a vector a protein. residues, logits, latents (of an autoencoder): a vector a "
        "residue. contacts (ESM-2): a probability for each pair. mean_latents: the mean of latents. classes: "
        "probabilities of a classifier.",
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
    tokens: int | None = Field(
        None, gt=0, description="Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."
    )
    shard_tokens: int = Field(
        262_144, gt=0, description="Tokens of a shard, the unit that is written and computed again after a failure."
    )

    def resolved(self, on_cuda: bool) -> EmbeddingSettings:
        """The same with the defaults of the device."""
        budget = self.tokens or (CUDA_TOKENS if on_cuda else CPU_TOKENS)
        precision = self.precision or ("bf16" if on_cuda or computes_bf16() else "fp32")
        return self.model_copy(update={"tokens": budget, "precision": precision})


@dataclass(frozen=True)
class JobFacts(ModelFacts):
    """A model as a job uses it.

    Attributes:
        outputs: in the order asked for.
        cache_keys: fingerprint of the features of each output that can be cached.
    """

    outputs: tuple[Output, ...] = ()
    cache_keys: dict[str, str] = field(default_factory=dict)


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
    if settings.long == "window" and settings.max_length is not None and settings.overlap >= settings.max_length:
        raise ConfigError(f"--overlap {settings.overlap}: must be less than --max-length {settings.max_length}")
