"""Files of plain arrays: .npy with the vectors of proteins, and safetensors with values of residues or pairs.

The ids are in the index. A .npy file has a vector per record and is memory-mapped. Safetensors files have the values of
distinct sequences, concatenated: one file per shard, as the job computed it, with ``values`` (R, C), ``offsets``
(U + 1,) of the sequences' first rows, and for int8 ``scales`` (C,).
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import parsing
from esmeray.common.publishing import link, writing
from esmeray.dataset.embeddings.arrays import RangedArray, as_float32, open_arrays, open_npy, rows_of
from esmeray.dataset.embeddings.formats.base import (
    NUMPY_DTYPES,
    Append,
    Block,
    Format,
    Rows,
    Source,
    TableRows,
    Values,
    narrowed,
)
from esmeray.dataset.embeddings.manifest import REMEDY, Dtype, OutputManifest, Part, Per


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


class _ShardRows(Rows):
    def __init__(self, output: OutputManifest, index: Part) -> None:
        self._index, self._is_pair = index, output.per == "pair"
        self._files = output.files
        self._first = np.array(output.first_sequences)
        # Verify a shard when it is opened: the residues of a whole proteome are never read at once.
        self._open = lru_cache(maxsize=1024)(lambda name: open_arrays(index.open(name), index.where(name)))

    def row(self, number: int) -> Values:
        sequence = int(self._index.sequences[number])
        with parsing(self._index.where(""), REMEDY):
            shard = int(np.searchsorted(self._first, sequence, side="right")) - 1
            arrays = self._open(self._files[shard])
            values = as_float32(rows_of(arrays, sequence - int(self._first[shard])), arrays.get("scales"))
            side = math.isqrt(len(values))  # not the record's length, because the record may have been cropped
            return values.reshape(side, side) if self._is_pair else values


class Safetensors(Format):
    """Safetensors files, one per shard of a job."""

    name = "safetensors"
    suffix = ".safetensors"
    holds = frozenset({"residue", "pair"})
    dtypes = ("fp32", "fp16", "bf16", "int8")
    read = _ShardRows

    def write(self, path: Path, output: OutputManifest, records: int) -> AbstractContextManager[Append]:
        raise NotImplementedError("shards are written by the job's workers")

    def merge(self, folder: Path, name: str, output: OutputManifest, source: Source) -> OutputManifest:
        with writing(folder):
            for path in source.shards:
                # Hard links: shards are on the same disk and may take a terabyte.
                link(path, folder / name / path.name)
        files = [f"{name}/{path.name}" for path in source.shards]
        return output.model_copy(update={"files": files, "first_sequences": list(source.first_sequences)})

    def size(self, per: Per, channels: int, dtype: Dtype, lengths_N: NDArray, distinct_U: NDArray) -> int:
        return super().size(per, channels, dtype, distinct_U, distinct_U)  # shards hold each distinct sequence once
