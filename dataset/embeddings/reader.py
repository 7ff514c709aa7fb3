"""Embeddings opened for reading: ids, and vectors by id, number or slice, of any output and format.

In: a folder that embed or concat_embeddings made. Out: NumPy arrays, fp32 whatever is stored. .npy and safetensors are
memory-mapped; of Parquet a row group is decoded at a time. Neither torch nor Ray is needed.

Shape legend: N records, C channels, L residues of a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from common.errors import ConfigError, DataError
from common.text import did_you_mean
from dataset.embeddings.arrays import as_float32, open_arrays
from dataset.embeddings.format import INDEX_FILE, EmbeddingsManifest, OutputManifest, parts, read_manifest

Values = NDArray[np.float32]


def open_embeddings(folder: Path | str, output: str | None = None) -> Embeddings:
    """Open one output of a folder, by default its first.

    Raises DataError where there are no embeddings, or they are damaged; ConfigError where there is no such output.
    """
    return Embeddings(Path(folder).expanduser(), output)


def open_vectors(folder: Path | str, output: str | None = None) -> Embeddings:
    """:func:`open_embeddings` for an output with one vector a protein; raises DataError for any other."""
    embeddings = open_embeddings(folder, output)
    if embeddings.output.per != "protein":
        problem = f"output {embeddings.name!r} has values for each {embeddings.output.per}"
        raise DataError(f"{folder}: {problem}; name one with one vector a protein, such as mean")
    return embeddings


class Embeddings:
    """Embeddings of N records, in the order of the input.

    ``embeddings[id]`` or ``embeddings[number]`` is a record's: (C,) where the output has one vector a protein, (L, C)
    where it has one a residue, (L, L) for contacts. ``embeddings[start:stop]`` is (n, C), or a list of arrays. Unknown
    ids raise KeyError, numbers beyond the end IndexError.

    Attributes:
        manifest: of the folder.
        output: of this output: what it is, its channels and dtype.
    """

    def __init__(self, folder: Path, output: str | None) -> None:
        self.folder = folder
        self.manifest: EmbeddingsManifest = read_manifest(folder)
        known = list(self.manifest.outputs)
        self.name = known[0] if output is None else output
        if self.name not in self.manifest.outputs:
            raise ConfigError(
                f"{folder}: no output {self.name!r}{did_you_mean(self.name, known)}; there are {', '.join(known)}"
            )
        self.output: OutputManifest = self.manifest.outputs[self.name]
        missing = [name for name in [INDEX_FILE, *self.output.files] if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder}: damaged: {missing[0]} is missing; compute the embeddings again")
        self._files: _Table | _Shards | _Hdf5 = _opened(self)

    def __len__(self) -> int:
        return self.manifest.num_records

    @property
    def channels(self) -> int:
        """C."""
        return self.output.channels

    @cached_property
    def ids(self) -> list[str]:
        """(N,) the ids, in the order of the input."""
        ids: list[str] = self.column("id").to_pylist()
        return ids

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """(N,) residues of each record."""
        return self.column("length").to_numpy()

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """(N,) number of each record's distinct sequence: equal sequences have the same."""
        return self.column("sequence").to_numpy()

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ValueError("a slice of embeddings has no step; take every one, then some of them")
            return self._files.rows(start, max(start, stop))
        return self._files.row(self._numbers[key] if isinstance(key, str) else self._checked(key))

    def __iter__(self) -> Iterator[Values]:
        return (self._files.row(number) for number in range(len(self)))

    def blocks(self, rows: int = 16_384) -> Iterator[tuple[int, Any]]:
        """The number of its first record, and the vectors (n, C), of one part after the other."""
        return ((start, self._files.rows(start, stop)) for start, stop in parts(len(self), rows))

    def finite_blocks(self, rows: int = 16_384) -> Iterator[tuple[int, Values]]:
        """:meth:`blocks` of vectors; raises DataError where one has NaN or infinity."""
        for start, block_nC in self.blocks(rows):
            self.refuse(start, ~np.isfinite(block_nC).all(axis=1), "has NaN or infinity")
            yield start, block_nC

    def refuse(self, start: int, wrong_n: NDArray[np.bool_], problem: str) -> None:
        """Raise DataError with the id of the first wrong one of n records that begin with record ``start``."""
        if wrong_n.any():
            raise DataError(f"{self.folder}: {self.ids[start + int(wrong_n.argmax())]!r} {problem} in {self.name}")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {record_id: number for number, record_id in enumerate(self.ids)}

    def _checked(self, number: int) -> int:
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        return number % len(self)

    def column(self, name: str) -> Any:
        """(N,) a column of the index, as Arrow has it."""
        return pq.read_table(self.folder / INDEX_FILE, columns=[name]).column(name)


def _opened(embeddings: Embeddings) -> _Table | _Shards | _Hdf5:
    kinds: dict[str, Any] = {"parquet": _Parquet, "npy": _Npy, "safetensors": _Shards, "hdf5": _Hdf5}
    opened: _Table | _Shards | _Hdf5 = kinds[embeddings.output.format](embeddings)
    return opened


class _Table(ABC):
    """(N, C) in one file."""

    def __init__(self, embeddings: Embeddings) -> None:
        output = embeddings.output
        self._path = embeddings.folder / output.files[0]
        self._shape = len(embeddings), output.channels
        self._scales = None if output.scales is None else np.array(output.scales, dtype=np.float32)

    def row(self, number: int) -> Values:
        return self.rows(number, number + 1)[0]

    def rows(self, start: int, stop: int) -> Values:
        return as_float32(self._stored(start, stop), self._scales)

    @abstractmethod
    def _stored(self, start: int, stop: int) -> NDArray:
        """(n, C) as it is stored."""


class _Npy(_Table):
    @cached_property
    def _mapped(self) -> NDArray:
        try:
            mapped: NDArray = np.load(self._path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}: damaged ({error}); compute the embeddings again") from error
        return mapped

    def _stored(self, start: int, stop: int) -> NDArray:
        return np.asarray(self._mapped[start:stop])


class _Parquet(_Table):
    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__(embeddings)
        try:
            self._file = pq.ParquetFile(self._path, memory_map=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}: damaged ({error}); compute the embeddings again") from error
        groups = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        self._ends = np.cumsum([0, *groups])
        self._group = lru_cache(maxsize=2)(self._read_group)

    def _stored(self, start: int, stop: int) -> NDArray:
        first, last = np.searchsorted(self._ends, [start, max(start, stop - 1)], side="right") - 1
        found = [self._group(int(n)) for n in range(first, min(int(last), self._ends.size - 2) + 1)]
        offset = int(self._ends[first])
        joined = found[0] if len(found) == 1 else np.concatenate(found)
        return joined[start - offset : stop - offset]

    def _read_group(self, number: int) -> NDArray:
        column = self._file.read_row_group(number, columns=["embedding"]).column(0).combine_chunks()
        values: NDArray = column.flatten().to_numpy(zero_copy_only=True)
        return values.reshape(-1, self._shape[1])


class _Shards:
    """Rows of distinct sequences end to end, in one file for each shard."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._paths = [embeddings.folder / name for name in embeddings.output.files]
        self._first = np.array(embeddings.output.first_sequences)
        self._open = lru_cache(maxsize=1024)(open_arrays)

    def row(self, number: int) -> Values:
        sequence = int(self._embeddings.sequences[number])
        shard = int(np.searchsorted(self._first, sequence, side="right")) - 1
        arrays, place = self._open(self._paths[shard]), sequence - int(self._first[shard])
        start, stop = arrays["offsets"][place : place + 2]
        values = as_float32(arrays["values"][start:stop], arrays.get("scales"))
        if self._embeddings.output.per != "pair":
            return values
        length = int(self._embeddings.lengths[number])
        return values.reshape(length, length)

    def rows(self, start: int, stop: int) -> list[Values]:
        return [self.row(number) for number in range(start, stop)]


class _Hdf5:
    """A dataset for each record."""

    def __init__(self, embeddings: Embeddings) -> None:
        import h5py  # here: half a second that the other formats don't need

        try:
            self._file = h5py.File(embeddings.folder / embeddings.output.files[0], "r")
        except OSError as error:
            raise DataError(f"{embeddings.folder}: damaged ({error}); compute the embeddings again") from error
        self._per_protein = embeddings.output.per == "protein"
        self._keys: list[str] = embeddings.column("key").to_pylist()

    def row(self, number: int) -> Values:
        return self._file[self._keys[number]][()].astype(np.float32)

    def rows(self, start: int, stop: int) -> Any:
        rows = [self.row(number) for number in range(start, stop)]
        return np.stack(rows) if self._per_protein and rows else rows
