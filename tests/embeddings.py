"""Folders of embeddings for tests, made without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataset.embeddings.arrays import scales_of
from dataset.embeddings.format import (
    Dtype,
    EmbeddingsManifest,
    FileFormat,
    OutputManifest,
    Per,
    write_index,
    write_manifest,
)
from dataset.embeddings.tables import SUFFIXES, Block, hdf5_key, write_datasets, write_table


def random_vectors(records: int, channels: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(records, channels)).astype(np.float32)


def make_embeddings(
    folder: Path,
    vectors: NDArray[np.float32] | dict[str, NDArray[np.float32]],
    ids: Sequence[str] | None = None,
    file_format: FileFormat = "parquet",
    dtype: Dtype = "fp32",
    per: Per = "protein",
    block: int = 7,
) -> Path:
    """A folder as embed makes it, in blocks of a few records; vectors of the output ``mean``, or by output."""
    outputs = vectors if isinstance(vectors, dict) else {"mean": vectors}
    number = len(next(iter(outputs.values())))
    ids = [f"p{n}" for n in range(number)] if ids is None else list(ids)
    lengths, keys = np.arange(number) + 10, [hdf5_key(record_id) for record_id in ids]
    folder.mkdir(parents=True)
    manifests = {}
    for name, values in outputs.items():
        scales = scales_of(np.abs(values).max(axis=0)) if dtype == "int8" else None
        starts = range(0, number, block)
        blocks = [Block(ids[n : n + block], lengths[n : n + block], values[n : n + block]) for n in starts]
        path = folder / f"{name}{SUFFIXES.get(file_format, '.h5')}"
        if file_format == "hdf5":
            write_datasets(path, zip(keys, ids, values, strict=True))
        else:
            write_table(path, file_format, blocks, values.shape, dtype, scales)
        manifests[name] = OutputManifest(
            description=f"{name} over residues",
            per=per,
            channels=values.shape[1],
            dtype=dtype,
            format=file_format,
            files=[path.name],
            scales=None if scales is None else scales.tolist(),
        )
    part = {"id": ids, "length": lengths, "sequence": np.arange(number)}
    write_index(folder, [{**part, "key": keys} if file_format == "hdf5" else part])
    job = {"model": folder.name}
    write_manifest(folder, EmbeddingsManifest(num_records=number, num_sequences=number, outputs=manifests, job=job))
    return folder
