"""The files of embeddings that people open: Parquet and .npy of one vector a record, HDF5 of a dataset for each.

In: ids and (n, C) fp32 blocks in the order of the input, a part at a time, so that memory does not grow with the input.
Out: one file. Parquet has the columns id, length and embedding (a list of fixed size), row groups of about 96 MB,
neither dictionary nor compression.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from common.errors import DataError
from common.publishing import writing
from dataset.embeddings.arrays import quantized
from dataset.embeddings.format import Dtype, FileFormat

ROW_GROUP_BYTES, MOST_ROWS = 96 << 20, 1 << 17
SUFFIXES: dict[FileFormat, str] = {"parquet": ".parquet", "npy": ".npy"}
NUMPY_DTYPES: dict[Dtype, str] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}


class Block(NamedTuple):
    """n records: ids, lengths in residues (n,), and vectors (n, C) fp32."""

    ids: list[str]
    lengths: NDArray[np.integer]
    vectors: NDArray[np.float32]


def write_table(
    path: Path,
    file_format: FileFormat,
    blocks: Iterable[Block],
    shape: tuple[int, int],
    dtype: Dtype,
    scales: NDArray[np.float32] | None = None,
) -> None:
    """Write (N, C) vectors to a file of Parquet or .npy; raises ResourceError where the disk refuses."""
    with writing(path):
        if file_format == "parquet":
            _write_parquet(path, blocks, shape[1], dtype, scales)
        else:
            _write_npy(path, blocks, shape, dtype, scales)


def block_rows(channels: int, dtype: Dtype) -> int:
    """Rows of a block, and of a row group of Parquet."""
    return min(MOST_ROWS, max(1, ROW_GROUP_BYTES // (channels * np.dtype(NUMPY_DTYPES[dtype]).itemsize)))


def narrowed(vectors: NDArray[np.float32], dtype: Dtype, scales: NDArray[np.float32] | None) -> NDArray:
    """Vectors in the dtype in which they are stored."""
    return quantized(vectors, scales) if scales is not None else vectors.astype(NUMPY_DTYPES[dtype], copy=False)


def _write_parquet(
    path: Path, blocks: Iterable[Block], channels: int, dtype: Dtype, scales: NDArray[np.float32] | None
) -> None:
    value = pa.field("element", pa.from_numpy_dtype(np.dtype(NUMPY_DTYPES[dtype])), nullable=False)
    schema = pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("length", pa.uint32(), nullable=False),
            pa.field("embedding", pa.list_(value, channels), nullable=False),
        ],
        metadata=None if scales is None else {"scales": json.dumps(scales.tolist())},
    )
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="none", write_statistics=False) as writer:
        for block in blocks:
            flat = pa.array(narrowed(block.vectors, dtype, scales).reshape(-1))
            columns = [
                pa.array(block.ids),
                pa.array(block.lengths.astype(np.uint32)),
                pa.FixedSizeListArray.from_arrays(flat, type=schema.field("embedding").type),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=len(block.ids))


def _write_npy(
    path: Path, blocks: Iterable[Block], shape: tuple[int, int], dtype: Dtype, scales: NDArray[np.float32] | None
) -> None:
    with path.open("wb") as file:
        header = {"descr": np.dtype(NUMPY_DTYPES[dtype]).str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(narrowed(block.vectors, dtype, scales)).data)


def write_datasets(path: Path, records: Iterable[tuple[str, str, NDArray]]) -> None:
    """Write an HDF5 file with a dataset for each record, with the attribute ``original_id``.

    ``records`` gives key, id and values; of equal keys the first counts. Raises ResourceError where the disk is full or
    can't be written.
    """
    import h5py  # here and elsewhere: few need it

    with writing(path), h5py.File(path, "w") as file:
        for key, record_id, values in records:
            if key not in file:
                file.create_dataset(key, data=values).attrs["original_id"] = record_id


def hdf5_key(record_id: str) -> str:
    """Name of a record's dataset: its id, without the ``/`` that would make a group."""
    return record_id.replace("/", "_")


def biotrainer_key(sequence: str) -> str:
    """Name of a record's dataset where biotrainer (1.4) looks for the sequence: ``calculate_sequence_hash`` there."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def refuse_equal_keys(ids: Iterable[str]) -> None:
    """Raise DataError where two ids have the same name in HDF5."""
    seen: dict[str, str] = {}
    for record_id in ids:
        if other := seen.get(key := hdf5_key(record_id)):
            raise DataError(
                f"ids {other!r} and {record_id!r} would both be the dataset {key!r} of an HDF5 file; choose another "
                "--format, or --hdf5-key hash"
            )
        seen[key] = record_id
