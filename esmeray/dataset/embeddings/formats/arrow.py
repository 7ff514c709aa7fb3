"""Vectors of proteins as tables with the columns id, length and embedding, a list of fixed size: Parquet and Lance.

Reading one row of Parquet reads a row group of about 8 MB. Groups have no dictionary and no compression, so decoding a
group only takes a copy of its bytes.

A Lance dataset is a LanceDB table whose database is the output folder. Lance manages the folder ``mean.lance``, and
reads single rows of a dataset at a URI. The library is an extra, esmeray[lance].
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

from esmeray.common.errors import ConfigError, parsing
from esmeray.dataset.embeddings.formats.base import NUMPY_DTYPES, Append, Block, Format, Source, TableRows, narrowed
from esmeray.dataset.embeddings.manifest import REMEDY, OutputManifest, Part

_GROUP_BYTES = 1 << 23


class _ArrowRows(TableRows):
    def _check(self, schema: pa.Schema, records: int) -> None:
        """Raise ValueError if the table has other vectors than the manifest says."""
        vector = schema.field("embedding").type
        shape = records, vector.list_size
        if shape != self.shape or vector.value_type != pa.from_numpy_dtype(self.dtype):
            raise ValueError(f"it has {records:,} vectors of {vector}, but the manifest says {self.dtype} {self.shape}")

    def _vectors(self, table: pa.Table, rows: int) -> NDArray:
        # The reshape checks the number of rows in the metadata: a column with fewer is damaged.
        values = table.column("embedding").combine_chunks().flatten()
        if values.null_count:
            raise ValueError("it has missing values")
        return values.to_numpy(zero_copy_only=False).reshape(rows, self.shape[1])


class _ParquetRows(_ArrowRows):
    def __init__(self, output: OutputManifest, index: Part) -> None:
        super().__init__(output, index)
        with parsing(self.path, REMEDY):
            self._file = pq.ParquetFile(self.file, memory_map=True, page_checksum_verification=True)
            groups = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
            self._ends = np.cumsum([0, *groups])
            self._check(self._file.schema_arrow, int(self._ends[-1]))
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
            table = self._file.read_row_group(number, columns=["embedding"])
            return self._vectors(table, int(self._ends[number + 1] - self._ends[number]))


class Parquet(Format):
    """Parquet table with one row per record, in input order."""

    name = "parquet"
    suffix = ".parquet"
    read = _ParquetRows

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        # A group never spans blocks, so that no rows need to be buffered.
        group_rows = max(1, _GROUP_BYTES // (output.channels * np.dtype(NUMPY_DTYPES[output.dtype]).itemsize))

        def append(block: Block) -> None:
            writer.write_table(_table(block, output), row_group_size=group_rows)

        plain: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_statistics": False}
        with pq.ParquetWriter(path, _schema(output), write_page_checksum=True, **plain) as writer:
            yield append


class _LanceRows(_ArrowRows):
    def __init__(self, output: OutputManifest, index: Part) -> None:
        super().__init__(output, index)
        self.path = index.where(output.files[0].partition("/")[0])
        # Verify local files only: Lance reads a URI itself and has no checksums.
        if index.uri is None:
            for name in output.files:
                index.open(name)
        library = _lance()
        with parsing(self.path, REMEDY):
            self._dataset: Any = library.dataset(str(self.path))
            self._check(self._dataset.schema, self._dataset.count_rows())

    def stored(self, start: int, stop: int) -> NDArray:
        with parsing(self.path, REMEDY):
            table = self._dataset.take(range(start, stop), columns=["embedding"])
            return self._vectors(table, stop - start)


class Lance(Format):
    """Lance table with one row per record, in input order."""

    name = "lance"
    suffix = ".lance"
    read = _LanceRows

    def check(self) -> None:
        _lance()

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        library = _lance()

        def append(block: Block) -> None:
            # One fragment per block, so that no rows need to be buffered.
            library.write_dataset(_table(block, output), str(path), mode="append" if path.exists() else "create")

        yield append

    def merge(self, folder: Path, name: str, output: OutputManifest, source: Source) -> OutputManifest:
        merged = super().merge(folder, name, output, source)
        paths = sorted(path for path in (folder / merged.files[0]).rglob("*") if path.is_file())
        return merged.model_copy(update={"files": [str(path.relative_to(folder)) for path in paths]})


def _lance() -> Any:
    try:
        import lance  # imported here because few users need it
    except ImportError as error:
        raise ConfigError("format lance: the package pylance is not installed; run: pip install pylance") from error
    return lance


def _table(block: Block, output: OutputManifest) -> pa.Table:
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
