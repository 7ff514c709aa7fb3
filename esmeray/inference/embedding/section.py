"""Settings of an embedding job, and of the choice of a layer."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from esmeray.train_config.section import (
    ComputeSection,
    LargeModelSection,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
)


class EmbedSection(LargeModelSection):
    """Outputs, precision and limits: the settings that the result of a job depends on."""

    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    outputs: list[str] = Field(default=["mean"], min_length=1)
    """Outputs to compute. Per protein: mean, max, cls, pseudo_log_likelihood (of a masked language model: mean
    per amino acid, sum, count), mean_latents (mean of an autoencoder's latents). Per residue:
    residues, logits, latents. Per pair: contacts (ESM-2). classes: probabilities of a classifier.
    """
    layers: list[int] = Field(default=[-1], min_length=1)
    """Layers of mean, max, cls and residues: 0 for the embeddings, -1 for the last layer."""
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    """Precision of the files. bf16 is for residues only; int8 is scaled per channel."""
    format: str = "parquet"
    """File format for protein vectors: parquet, npy, lance (needs pylance) or hdf5. hdf5 also holds outputs per
    residue and pair.
    """
    hdf5_key: Literal["id", "hash"] = "id"
    """Names in HDF5: the id (with _ for /), or the sequence hash that biotrainer uses."""
    long: Literal["error", "crop", "window"] = "error"
    """Handling of sequences longer than max_length residues. error: reject; crop: keep the start; window: average
    overlapping windows per residue.
    """
    max_length: PositiveInt | None = None
    """Maximum residues of a sequence that is computed whole. Default: the model's maximum; unlimited for ESM-2."""
    overlap: NonNegativeInt = 256
    """Residues shared by neighbouring windows."""
    shard_tokens: PositiveInt = 262_144
    """Tokens per shard. Shards are written as a whole, and computed again after a failure."""


class EmbedJobSection(EmbedSection):
    """Models, sequences, devices and outputs of a job."""

    models: list[str] = Field(min_length=1)
    """Models: folders, URIs, hub names or runs. With several models each has a folder in the output."""
    input: list[str] = Field(min_length=1)
    """FASTA files, folders, quoted globs, or one store; also as URIs."""
    output: Path
    """Folder to create, or its URI. A finished folder of the same model and settings gets the missing records."""
    known: list[str] = Field(default=[])
    """Existing outputs with the same model and settings, as folders or URIs. Their values are reused."""
    random_weights: bool = False
    """Accept model sizes (esm2_t6_8M), which have random weights, for trying things out."""
    cache: Path | None = None
    """Cache folder, shared by jobs and by classifiers with frozen backbones. Default: none."""
    cache_gb: PositiveFloat = 20.0
    """Maximum size of the cache in GB. Beyond it the oldest values are removed."""
    workers: PositiveInt | None = None
    """Number of cluster actors. Default: one per GPU, or one per CPU core."""
    gpus_per_worker: PositiveFloat = 1.0
    """GPUs per actor; 0.5 runs two small models on each GPU."""


class LayersSection(ComputeSection):
    """Labelled records and outputs, and how the model runs."""

    input: list[str] = Field(min_length=1)
    """Labelled files, folders or quoted globs: CSV, TSV, Parquet or FASTA."""
    retrieval: bool = False
    """Score a layer by the label of the nearest neighbour instead of a probe, e.g. for families with few records."""
    report: Path | None = None
    """Folder for layers.csv and layers.png. Default: layers-INPUT in the current folder."""
    output: Path | None = None
    """Folder for the model cut at the chosen layer. Default: none."""
    seed: NonNegativeInt = 0
    """Random seed of folds, sampled rows and intervals."""
    precision: Precision = "fp32"
    """Precision of the computation."""


def report_name(device: str) -> str:
    """File name of a job's report on this kind of device."""
    return f"embedding_performance_report_{device}.json"
