"""HDF5 with one dataset per record and the attribute ``original_id``: vectors, or values of residues or pairs.

The dataset's name is the record's id, or the hash that biotrainer uses to find the sequence. If names are equal, only
the first record is stored.
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
            # blockcache, because HDF5 alternates between its tree of names and the values.
            self._file = h5py.File(index.open(output.files[0], "blockcache"), "r")
        self._shape = (output.channels,) if output.per == "protein" else None
        self._keys: list[str] = index.column("key").to_pylist()

    def row(self, number: int) -> Values:
        with parsing(self._path, REMEDY):
            dataset = self._file[self._keys[number]]
            if dataset.id.get_storage_size() < dataset.nbytes:  # HDF5 would fill in missing values
                raise ValueError(f"dataset {self._keys[number]} is missing values")
            if self._shape is not None and dataset.shape != self._shape:
                raise ValueError(f"dataset {self._keys[number]} has shape {dataset.shape}")
            values: Values = dataset[()].astype(np.float32)
            return values

    def rows(self, start: int, stop: int) -> Any:
        # One dataset after the other: HDF5 has no faster way to read many small datasets.
        rows = super().rows(start, stop)
        return np.stack(rows) if self._shape is not None and rows else rows


class Hdf5(Format):
    """HDF5 with one dataset per record."""

    name = "hdf5"
    suffix = ".h5"
    holds = frozenset({"protein", "residue", "pair"})
    dtypes = ("fp32", "fp16")
    has_keys = True
    read = _Hdf5Rows

    @contextmanager
    def write(self, path: Path, output: OutputManifest, records: int) -> Iterator[Append]:
        import h5py  # local imports of h5py: they take half a second, and other formats don't need it

        def append(block: Block) -> None:
            assert block.keys is not None
            for key, record_id, values in zip(block.keys, block.ids, block.values, strict=True):
                if key not in file:  # equal sequences have equal hashes and share one dataset
                    dataset = file.create_dataset(key, data=values.astype(NUMPY_DTYPES[output.dtype]))
                    dataset.attrs["original_id"] = record_id

        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
        # The oldest format, as h5py.File writes it: every reader knows it, and it has no times, so that equal values
        # are equal files.
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
        # Without a buffer: h5py 3.16 hides write errors that occur while a dataset is closed.
        access.set_sieve_buf_size(0)
        try:
            with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fapl=access)) as file:
                yield append
                file.flush()
        except RuntimeError as error:
            number = re.search(r"errno = (\d+)", str(error))  # a failed flush quotes the system's error number
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def hdf5_key(record_id: str) -> str:
    """Return the name of a record's dataset: its id without ``/``, which would create a group."""
    return record_id.replace("/", "_")


def biotrainer_key(sequence: str) -> str:
    """Return the name under which biotrainer (1.4) finds a sequence, as its ``calculate_sequence_hash``."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def check_ids(ids: Iterable[str]) -> None:
    """Raise DataError if two ids have the same name in HDF5, or if an id is the name of a group."""
    seen = {".": "the root group"}  # HDF5's name for it
    for record_id in ids:
        key = hdf5_key(record_id)
        if key in seen:
            raise DataError(
                f"{seen[key]} and id {record_id!r} would both be named {key!r} in the HDF5 file; use another "
                "--embed.format, or --embed.hdf5_key hash"
            )
        seen[key] = f"id {record_id!r}"
