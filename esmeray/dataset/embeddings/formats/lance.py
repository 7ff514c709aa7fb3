"""Vectors of proteins as a Lance dataset: a LanceDB table whose database is the output folder.

The columns are the same as in Parquet. The folder ``mean.lance`` is managed by Lance. The library is an extra,
esmeray[lance]. It also reads single rows of a dataset at a URI.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, parsing
from esmeray.dataset.embeddings.formats.base import Append, Block, Format, Source, TableRows
from esmeray.dataset.embeddings.formats.parquet import vector_table
from esmeray.dataset.embeddings.manifest import REMEDY, OutputManifest, Part


class _LanceRows(TableRows):
    def __init__(self, output: OutputManifest, index: Part) -> None:
        super().__init__(output, index)
        self.path = index.where(output.files[0].partition("/")[0])
        # Verify local files only: Lance reads a URI itself and has no checksums.
        if index.uri is None:
            for name in output.files:
                index.open(name)
        library = _library()
        with parsing(self.path, REMEDY):
            self._dataset: Any = library.dataset(str(self.path))
            vector = self._dataset.schema.field("embedding").type
            shape = (self._dataset.count_rows(), vector.list_size)
            if shape != self.shape or vector.value_type != pa.from_numpy_dtype(self.dtype):
                raise ValueError(
                    f"it has {shape[0]:,} vectors of {vector}, but the manifest says {self.dtype} {self.shape}"
                )

    def stored(self, start: int, stop: int) -> NDArray:
        with parsing(self.path, REMEDY):
            column = self._dataset.take(range(start, stop), columns=["embedding"]).column(0).combine_chunks()
            return column.flatten().to_numpy(zero_copy_only=False).reshape(stop - start, self.shape[1])


class Lance(Format):
    """Lance table with one row per record, in input order."""

    name = "lance"
    suffix = ".lance"
    read = _LanceRows

    def check(self) -> None:
        _library()

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        library = _library()

        def append(block: Block) -> None:
            # One fragment per block, so that no rows need to be buffered.
            library.write_dataset(vector_table(block, output), str(path), mode="append" if path.exists() else "create")

        yield append

    def merge(self, folder: Path, name: str, output: OutputManifest, source: Source) -> OutputManifest:
        merged = super().merge(folder, name, output, source)
        paths = sorted(path for path in (folder / merged.files[0]).rglob("*") if path.is_file())
        return merged.model_copy(update={"files": [str(path.relative_to(folder)) for path in paths]})


def _library() -> Any:
    try:
        import lance  # imported here because few users need it
    except ImportError as error:
        raise ConfigError("format lance: the package pylance is not installed; run: pip install pylance") from error
    return lance
