"""Vectors of proteins as Parquet: columns id, length and embedding, a list of fixed size.

Reading one row reads a row group of about 8 MB. Groups have no dictionary and no compression, so decoding a group only
takes a copy of its bytes.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from esmeray.common.errors import parsing
from esmeray.dataset.embeddings.formats.base import NUMPY_DTYPES, Append, Block, Format, TableRows, narrowed
from esmeray.dataset.embeddings.manifest import REMEDY, OutputManifest, Part

_GROUP_BYTES = 1 << 23


class _ParquetRows(TableRows):
    def __init__(self, output: OutputManifest, index: Part) -> None:
        super().__init__(output, index)
        with parsing(self.path, REMEDY):
            self._file = pq.ParquetFile(self.file, memory_map=True, page_checksum_verification=True)
            groups = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
            self._ends = np.cumsum([0, *groups])
            records, channels = self.shape
            vector = self._file.schema_arrow.field("embedding").type
            if vector.value_type != pa.from_numpy_dtype(self.dtype) or vector.list_size != channels:
                raise ValueError(
                    f"it has vectors of {vector}, but the manifest says {channels:,} channels of {self.dtype}"
                )
            if int(self._ends[-1]) != records:
                raise ValueError(f"it has {self._ends[-1]:,} records, but the manifest says {records:,}")
        self._group = lru_cache(maxsize=2)(self._read_group)  # two, because a block may span two groups

    def stored(self, start: int, stop: int) -> NDArray:
        # An empty slice at the end still needs a group for the dtype and channels.
        first, last = np.searchsorted(self._ends, [start, max(start, stop - 1)], side="right") - 1
        groups = [self._group(int(n)) for n in range(first, min(int(last), self._ends.size - 2) + 1)]
        offset = int(self._ends[first])
        joined = groups[0] if len(groups) == 1 else np.concatenate(groups)
        return joined[start - offset : stop - offset]

    def _read_group(self, number: int) -> NDArray:
        with parsing(self.path, REMEDY):
            column = self._file.read_row_group(number, columns=["embedding"]).column(0).combine_chunks()
            # The reshape checks the number of rows in the metadata: a column with fewer is damaged.
            rows = int(self._ends[number + 1] - self._ends[number])
            return column.flatten().to_numpy(zero_copy_only=True).reshape(rows, self.shape[1])


class Parquet(Format):
    """Parquet table with one row per record, in input order."""

    name = "parquet"
    suffix = ".parquet"
    read = _ParquetRows

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        schema = _schema(output)
        # A group never spans blocks, so that no rows need to be buffered.
        group_rows = max(1, _GROUP_BYTES // (output.channels * np.dtype(NUMPY_DTYPES[output.dtype]).itemsize))

        def append(block: Block) -> None:
            writer.write_table(vector_table(block, output), row_group_size=group_rows)

        plain: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_statistics": False}
        with pq.ParquetWriter(path, schema, write_page_checksum=True, **plain) as writer:
            yield append


def vector_table(block: Block, output: OutputManifest) -> pa.Table:
    """Return a block as a table: ids, lengths, and vectors as stored."""
    schema = _schema(output)
    values = pa.array(narrowed(block.values, output).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(values, type=schema.field("embedding").type)
    return pa.Table.from_arrays(
        [pa.array(block.ids), pa.array(block.lengths.astype(np.uint32)), vectors], schema=schema
    )


def _schema(output: OutputManifest) -> pa.Schema:
    value = pa.field("element", pa.from_numpy_dtype(np.dtype(NUMPY_DTYPES[output.dtype])), nullable=False)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("length", pa.uint32(), nullable=False),
            pa.field("embedding", pa.list_(value, output.channels), nullable=False),
        ],
        metadata=None if output.scales is None else {"scales": json.dumps(output.scales)},
    )
