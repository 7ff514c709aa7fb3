"""Vectors of proteins as one memory-mapped .npy; the ids are in the index."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import parsing
from esmeray.dataset.embeddings.arrays import RangedArray, open_npy
from esmeray.dataset.embeddings.formats.base import NUMPY_DTYPES, Append, Block, Format, TableRows, narrowed
from esmeray.dataset.embeddings.manifest import REMEDY, OutputManifest


class _NpyRows(TableRows):
    @cached_property
    def _mapped(self) -> NDArray | RangedArray:
        # The header is parsed as Python syntax, so parse errors are refused. An overflow of a huge shape must not warn.
        with parsing(self.path, REMEDY, SyntaxError, TokenError), np.errstate(over="ignore"):
            mapped = open_npy(self.file)
            if (mapped.shape, mapped.dtype) != (self.shape, self.dtype):
                raise ValueError(
                    f"it has {mapped.dtype} {mapped.shape}, but the manifest says {self.dtype} {self.shape}"
                )
            return mapped

    def stored(self, start: int, stop: int) -> NDArray:
        with parsing(self.path, REMEDY):
            return np.asarray(self._mapped[start:stop])


class Npy(Format):
    """.npy array (N, C), in input order."""

    name = "npy"
    suffix = ".npy"
    read = _NpyRows

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        # Write the header by hand, because np.save needs the whole array in memory.
        dtype = np.dtype(NUMPY_DTYPES[output.dtype]).str
        header = {"descr": dtype, "fortran_order": False, "shape": (records, output.channels)}

        def append(block: Block) -> None:
            file.write(np.ascontiguousarray(narrowed(block.values, output)).data)

        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            yield append
