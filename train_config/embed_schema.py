"""Settings of an embedding job, which its result depends on."""

from typing import Literal

from pydantic import Field

from common.processor import computes_bf16
from train_config.section import NonNegativeInt, PositiveInt, Precision, Section, Tokens

CPU_TOKENS, CUDA_TOKENS = 2_048, 65_536
"""On the CPU a small budget stays in the cache."""


class EmbedSection(Section):
    """Outputs, precision and limits."""

    outputs: list[str] = Field(["mean"], min_length=1)
    """mean, max, cls: a vector a protein. residues, logits, latents (of an autoencoder): a vector a residue. contacts
    (ESM-2): a probability for each pair. mean_latents: the mean of latents. classes: probabilities of a classifier."""
    layers: list[int] = Field([-1], min_length=1)
    """Layers of mean, max, cls and residues: 0 the embeddings, -1 the last."""
    precision: Precision | None = None
    """Of the computation. Default: bf16; fp32 on a processor without instructions for bf16."""
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    """Precision of the files. bf16: of residues alone; int8: scaled by channel."""
    format: str = "parquet"
    """Files of the vectors of proteins: parquet, npy or hdf5, which also holds outputs of residues and pairs."""
    hdf5_key: Literal["id", "hash"] = "id"
    """Names in HDF5: the id (with _ for /), or the hash by which biotrainer finds a sequence."""
    long: Literal["error", "crop", "window"] = "error"
    """Sequences of more than max_length residues: error; crop keeps the start; window averages overlapping windows over
    the residues."""
    max_length: PositiveInt | None = None
    """Residues. Default: what positions of the model reach, for ESM-2 any length."""
    overlap: NonNegativeInt = 256
    """Residues that neighbouring windows share."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    shard_tokens: PositiveInt = 262_144
    """Tokens of a shard, the unit that is written and computed again after a failure."""

    def resolved(self, on_cuda: bool) -> "EmbedSection":
        """The same with the defaults of the device."""
        budget = self.tokens or (CUDA_TOKENS if on_cuda else CPU_TOKENS)
        precision = self.precision or ("bf16" if on_cuda or computes_bf16() else "fp32")
        return self.model_copy(update={"tokens": budget, "precision": precision})
