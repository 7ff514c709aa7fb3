"""HDF5 with a dataset for each record, with the attribute ``original_id``: vectors, or values of residues or pairs.

A dataset is named by the record's id, or by the hash by which biotrainer finds its sequence; of equal names the first
counts.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.common.errors import DataError, parsing
from esmeray.dataset.embeddings.formats.base import NUMPY_DTYPES, Append, Block, Format, Rows, Values
from esmeray.dataset.embeddings.manifest import REMEDY, OutputManifest, Part


class _Hdf5Rows(Rows):
    def __init__(self, output: OutputManifest, index: Part) -> None:
        import h5py

        self._path = index.where(output.files[0])
        with parsing(self._path, REMEDY):
            # Blocks stay: HDF5 goes back and forth between its tree of names and the values.
            self._file = h5py.File(index.open(output.files[0], "blockcache"), "r")
        self._shape = (output.channels,) if output.per == "protein" else None
        self._keys: list[str] = index.column("key").to_pylist()

    def row(self, number: int) -> Values:
        with parsing(self._path, REMEDY):
            dataset = self._file[self._keys[number]]
            if dataset.id.get_storage_size() < dataset.nbytes:  # values that the file lacks would be made up
                raise ValueError(f"{self._keys[number]} lacks values")
            if self._shape is not None and dataset.shape != self._shape:
                raise ValueError(f"{self._keys[number]} has shape {dataset.shape}")
            values: Values = dataset[()].astype(np.float32)
            return values

    def rows(self, start: int, stop: int) -> Any:
        # One dataset after the other: HDF5 has no faster way to many small ones.
        rows = super().rows(start, stop)
        return np.stack(rows) if self._shape is not None and rows else rows


class Hdf5(Format):
    """A dataset for each record."""

    name = "hdf5"
    suffix = ".h5"
    holds = frozenset({"protein", "residue", "pair"})
    dtypes = ("fp32", "fp16")
    has_keys = True
    read = _Hdf5Rows

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        import h5py  # here and below: half a second that the other formats don't need

        def append(block: Block) -> None:
            assert block.keys is not None
            for key, record_id, values in zip(block.keys, block.ids, block.values, strict=True):
                if key not in file:  # equal sequences have equal hashes, and one dataset
                    dataset = file.create_dataset(key, data=values.astype(NUMPY_DTYPES[output.dtype]))
                    dataset.attrs["original_id"] = record_id

        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
        # The oldest format, as h5py.File writes it: every reader knows it, and it has no times, so that equal values
        # are equal files.
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
        # Without a buffer: a write that fails while a dataset is closed raises nothing (h5py 3.16).
        access.set_sieve_buf_size(0)
        try:
            with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fapl=access)) as file:
                yield append
                file.flush()
        except RuntimeError as error:
            number = re.search(r"errno = (\d+)", str(error))  # a flush that failed quotes the system's error
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def hdf5_key(record_id: str) -> str:
    """Name of a record's dataset: its id, without the ``/`` that would make a group."""
    return record_id.replace("/", "_")


def biotrainer_key(sequence: str) -> str:
    """Name of a record's dataset where biotrainer (1.4) looks for the sequence: ``calculate_sequence_hash`` there."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def check_ids(ids: Iterable[str]) -> None:
    """Raise DataError where two ids have the same name in HDF5, or one has that of a group itself."""
    seen = {".": "the root group"}  # HDF5's own name for it
    for record_id in ids:
        key = hdf5_key(record_id)
        if key in seen:
            raise DataError(
                f"{seen[key]} and id {record_id!r} would both be {key!r} in an HDF5 file; choose another "
                "--embed.format, or --embed.hdf5_key hash"
            )
        seen[key] = f"id {record_id!r}"
