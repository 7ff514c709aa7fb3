"""Embedding folders for tests, written without a model."""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.embeddings.formats.base import Block, Source
from esmeray.dataset.embeddings.formats.hdf5 import hdf5_key
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import (
    TRAINING_FILE,
    Dtype,
    EmbeddingsManifest,
    OutputManifest,
    Per,
    write_index,
    write_manifest,
)
from esmeray.dataset.fasta.records import keys_of

INSTALLED = [name for name in FORMATS if name != "lance" or find_spec("lance")]
"""Formats whose library is installed."""


def random_vectors(records: int, channels: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(records, channels)).astype(np.float32)


def make_embeddings(
    folder: Path,
    vectors: NDArray[np.float32] | dict[str, NDArray[np.float32]],
    ids: Sequence[str] | None = None,
    file_format: str = "parquet",
    dtype: Dtype = "fp32",
    per: Per = "protein",
    block: int = 7,
    model: str | None = "small",
    sequences: Sequence[str] | None = None,
    learnt: Sequence[str] | None = None,
) -> Path:
    """Write a folder like ``embed run``, in blocks of a few records; ``vectors``: of the output ``mean``, or by output.

    ``sequences``: by default their length is 10 plus the number in the id. ``learnt``: sequences to which the model
    was fitted.
    """
    outputs = vectors if isinstance(vectors, dict) else {"mean": vectors}
    number = len(next(iter(outputs.values())))
    ids = [f"p{n}" for n in range(number)] if ids is None else list(ids)
    keys = [hdf5_key(record_id) for record_id in ids]
    sequences = sequences or ["M" * (10 + int(re.sub(r"\D", "", name) or 0)) for name in ids]
    lengths = np.array([len(sequence) for sequence in sequences])
    folder.mkdir(parents=True)
    manifests = {}
    for name, values in outputs.items():
        output = OutputManifest(
            description=f"{name} over residues", per=per, channels=values.shape[1], dtype=dtype, format=file_format
        )

        def blocks(_rows: int, values=values) -> Iterator[Block]:
            for n in range(0, number, block):
                rows = slice(n, n + block)
                yield Block(ids[rows], lengths[rows], values[rows], keys[rows])

        source = Source(number, blocks, lambda values=values: np.abs(values).max(axis=0))
        manifests[name] = FORMATS[file_format].merge(folder, name, output, source)
    keys_n2 = keys_of(sequence.encode() for sequence in sequences)
    part = {"id": ids, "length": lengths, "sequence": np.arange(number)}
    part |= {"hash": keys_n2[:, 0], "second_hash": keys_n2[:, 1]}
    part |= {"key": keys} if file_format == "hdf5" else {}
    job: dict[str, Any] = {"model": model}
    if learnt is not None:
        np.save(folder / TRAINING_FILE, keys_of(sequence.encode() for sequence in learnt)[:, 0])
    write_index(folder, [part], has_keys="key" in part)
    write_manifest(folder, EmbeddingsManifest(num_records=number, num_sequences=number, outputs=manifests, job=job))
    return folder
