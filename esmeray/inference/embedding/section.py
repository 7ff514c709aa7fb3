"""Settings of an embedding job."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from esmeray.train_config.section import ComputeSection, NonNegativeInt, PositiveFloat, PositiveInt


class EmbedSection(ComputeSection):
    """Outputs, precision and limits: what the result of a job depends on."""

    device: Literal["cpu", "cuda"] | None = None
    """Device that computes, cpu or cuda. Default: CUDA where there is one."""
    outputs: list[str] = Field(default=["mean"], min_length=1)
    """Outputs to compute. mean, max, cls: a vector a protein. residues, logits, latents (of an autoencoder): a vector a
    residue. contacts (ESM-2): a probability for each pair. mean_latents: the mean of latents. classes: probabilities
    of a classifier."""
    layers: list[int] = Field(default=[-1], min_length=1)
    """Layers of mean, max, cls and residues: 0 the embeddings, -1 the last."""
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    """Precision of the files. bf16: of residues alone; int8: scaled by channel."""
    format: str = "parquet"
    """Files of the vectors of proteins: parquet, npy, lance (needs pylance), or hdf5, which also holds outputs of
    residues and pairs."""
    hdf5_key: Literal["id", "hash"] = "id"
    """Names in HDF5: the id (with _ for /), or the hash by which biotrainer finds a sequence."""
    long: Literal["error", "crop", "window"] = "error"
    """Sequences of more than max_length residues: error; crop keeps the start; window averages overlapping windows over
    the residues."""
    max_length: PositiveInt | None = None
    """Residues of the longest sequence that is computed whole. Default: what positions of the model reach, for ESM-2
    any length."""
    overlap: NonNegativeInt = 256
    """Residues that neighbouring windows share."""
    shard_tokens: PositiveInt = 262_144
    """Tokens of a shard, the unit that is written and computed again after a failure."""


class EmbedJobSection(EmbedSection):
    """Models, sequences, devices and outputs of a job."""

    models: list[str] = Field(min_length=1)
    """Folders, URIs, hub names or runs; of several each gets a folder in the output."""
    input: list[str] = Field(min_length=1)
    """FASTA files, folders, quoted globs, or one store; each also as a URI."""
    output: Path
    """Folder to make, or the URI of one. A finished one of the same model and settings grows by the records that it
    lacks."""
    known: list[str] = Field(default=[])
    """Outputs of the same model and settings, folders or URIs, from which values of sequences are taken."""
    random_weights: bool = False
    """Take names of sizes (esm2_t6_8M), whose weights are random, to try things out."""
    cache: Path | None = None
    """Folder of values that jobs share, and classifiers of frozen backbones. Default: none."""
    cache_gb: PositiveFloat = 20.0
    """Size of the cache; beyond it the oldest values are removed."""
    workers: PositiveInt | None = None
    """Actors of a cluster. Default: one a GPU, or one a CPU core."""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that each actor gets."""
    gpus_per_worker: PositiveFloat = 1.0
    """GPUs of an actor; 0.5 puts two on each, for small models."""
    stage_dir: Path | None = None
    """Folder of each node's own disk to which the store is copied."""
