"""Interface of an embedding format: write a file in blocks, read it, estimate its size, merge values into it.

Shape legend: N records, n records of a block, C channels, L residues of a record, U distinct sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import writing
from esmeray.dataset.embeddings.arrays import as_float32, quantized, scales_of
from esmeray.dataset.embeddings.manifest import MANIFEST_FILE, REMEDY, Dtype, OutputManifest, Part, Per

NUMPY_DTYPES: dict[Dtype, str] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
_BYTES: dict[Dtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_BLOCK_BYTES, _MAX_ROWS = 96 << 20, 1 << 17

Values: TypeAlias = NDArray[np.float32]


class Block(NamedTuple):
    """n records: ids, lengths in residues (n,), and values: (n, C) fp32, or an array (L, C) or (L, L) per record.

    ``keys``: names of the records' datasets, for formats that need them.
    """

    ids: list[str]
    lengths: NDArray[np.integer]
    values: Any
    keys: list[str] | None = None


Append: TypeAlias = Callable[[Block], None]


@dataclass(frozen=True)
class Source:
    """Values of one output of N records, to be merged into the final files.

    Attributes:
        blocks: yields the values in record order, in blocks of the given number of records.
        largest: returns the largest absolute value of each channel, (C,).
        shards: files with the arrays of distinct sequences, in order, if there are any.
        first_sequences: number of the first sequence in each shard.
    """

    records: int
    blocks: Callable[[int], Iterator[Block]]
    largest: Callable[[], Values] | None = None
    shards: Sequence[Path] = ()
    first_sequences: Sequence[int] = ()


class Rows(ABC):
    """One output of one folder, open for reading."""

    @abstractmethod
    def __init__(self, output: OutputManifest, index: Part) -> None:
        """Open the output. Raises DataError if a file is damaged."""

    @abstractmethod
    def row(self, number: int) -> Values:
        """Return the values of one record: (C,), (L, C) or (L, L)."""

    def rows(self, start: int, stop: int) -> Any:
        """Return the values of records ``start`` to before ``stop``: a list of arrays, or (n, C)."""
        return [self.row(number) for number in range(start, stop)]


class Format(ABC):
    """A file format for embeddings.

    Attributes:
        name: name in manifests and settings.
        suffix: suffix of its files.
        holds: units that can have a row; by default proteins only.
        dtypes: dtypes of stored values; by default the dtypes of tables of vectors.
        has_keys: True if each record has its own dataset, named in the index.
        read: class that opens an output.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    holds: ClassVar[frozenset[Per]] = frozenset({"protein"})
    dtypes: ClassVar[tuple[Dtype, ...]] = ("fp32", "fp16", "int8")
    has_keys: ClassVar[bool] = False
    read: ClassVar[type[Rows]]

    def check(self) -> None:  # noqa: B027
        """Raise ConfigError if the format's library is not installed. By default no library is needed."""

    @abstractmethod
    def write(self, path: Path, output: OutputManifest, records: int) -> AbstractContextManager[Append]:
        """Begin a file of ``records`` records. The context's value is the function that appends a block."""

    def size(self, per: Per, channels: int, dtype: Dtype, lengths_N: NDArray, distinct_U: NDArray) -> int:
        """Return the bytes of the values, without ids, from the lengths of records and of distinct sequences."""
        rows = {"protein": lengths_N.size, "residue": int(lengths_N.sum()), "pair": int((lengths_N**2).sum())}[per]
        return rows * channels * _BYTES[dtype]

    def merge(self, folder: Path, name: str, output: OutputManifest, source: Source) -> OutputManifest:
        """Write an output's files; return its complete manifest.

        Raises ResourceError if the disk is full or not writable.
        """
        if output.dtype == "int8" and output.scales is None:
            assert source.largest is not None
            # Before the first block, because all blocks share the scales.
            output = output.model_copy(update={"scales": scales_of(source.largest()).tolist()})
        path = folder / (name + self.suffix)
        # In blocks, because the output may be larger than memory.
        with writing(path), self.write(path, output, source.records) as append:
            for block in source.blocks(self.block_rows(output)):
                append(block)
        return output.model_copy(update={"files": [path.name]})

    def block_rows(self, output: OutputManifest) -> int:
        """Return the records per block, bounded by memory: 1 if a record has many rows."""
        if output.per != "protein":
            return 1
        return min(_MAX_ROWS, max(1, _BLOCK_BYTES // (output.channels * _BYTES[output.dtype])))


class TableRows(Rows):
    """(N, C) vectors in one file. ``path`` is for messages, ``file`` is read (see :meth:`Part.open`)."""

    def __init__(self, output: OutputManifest, index: Part) -> None:
        self.path = index.where(output.files[0])
        with parsing(self.path, REMEDY):
            self.file = index.open(output.files[0])
        if output.dtype == "int8" and len(output.scales or ()) != output.channels:
            raise DataError(f"{index.where(MANIFEST_FILE)}: lacks the scales of the int8 channels; {REMEDY}")
        self.shape = index.num_records, output.channels
        self.dtype = np.dtype(NUMPY_DTYPES[output.dtype])
        self._scales = scales_array(output)

    def row(self, number: int) -> Values:
        return self.rows(number, number + 1)[0]

    def rows(self, start: int, stop: int) -> Values:
        return as_float32(self.stored(start, stop), self._scales)

    @abstractmethod
    def stored(self, start: int, stop: int) -> NDArray:
        """Return the vectors as stored, (n, C)."""


def scales_array(output: OutputManifest) -> Values | None:
    """Return the (C,) int8 scales, or None."""
    return None if output.scales is None else np.array(output.scales, dtype=np.float32)


def narrowed(vectors: Values, output: OutputManifest) -> NDArray:
    scales_C = scales_array(output)
    return vectors.astype(NUMPY_DTYPES[output.dtype], copy=False) if scales_C is None else quantized(vectors, scales_C)
