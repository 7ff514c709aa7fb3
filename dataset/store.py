"""A store opened for reading: residues, ids, lengths and hashes of its records, without copying them.

In: a folder that :mod:`dataset.conversion` made. Out: read-only NumPy views of the memory-mapped file. What the files
hold is described in :mod:`dataset.store_format`.

Nothing is mapped before the file's size, its meta pages and its B-tree have been checked, because LMDB follows what
stands there, and a truncated or damaged file would end the process by a signal. Each block's CRC-32 is checked when
a process first reads it. The map is opened once per process and file, when first needed, and never carried across a
fork or a pickle. It stays open until the process ends, since views into it may be anywhere.

Shape legend: N records of the store, L residues of one record.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import lmdb
import numpy as np

from dataset.store_format import (
    DATA_FILE,
    LMDB_MAJOR,
    Frame,
    Kind,
    StoreManifest,
    file_sha256,
    index_crc32,
    key_bytes,
    read_manifest,
    unframe,
)
from train_config.errors import DataError

_REMEDY = "convert the FASTA again, or copy the store again"


class Store:
    """Read access to a store.

    A Store may be pickled and may cross a fork: only its path and manifest do, and each process opens the file itself.
    """

    def __init__(self, path: Path | str, verify: Literal["full", "quick"] = "quick") -> None:
        """Check a store; map nothing yet.

        Args:
            path: the store's folder.
            verify: quick checks the manifest, the file's size and the pages that LMDB follows; full also the SHA-256 of
                all of it, which reads it once.

        Raises:
            DataError: no store, one of another format version, or a damaged one.
        """
        self.path = Path(path).absolute()
        self.manifest: StoreManifest = read_manifest(self.path)
        self._check_file(full=verify == "full")
        self._opened: _OpenFile | None = None

    def __len__(self) -> int:
        return self.manifest.num_records

    @property
    def checksum(self) -> str:
        """Identity of the content, hex: the same for the same records in the same order."""
        return self.manifest.checksum

    @property
    def lengths(self) -> np.ndarray:
        """(N,) uint32: residues of each record."""
        return self._file.lengths

    @property
    def sequence_hashes(self) -> np.ndarray:
        """(N,) uint64: XXH3-64 of each sequence; equal sequences have equal hashes, in any store."""
        return self._file.hashes

    def sequence(self, index: int) -> np.ndarray:
        """(L,) uint8: the residues of one record as ASCII, a read-only view of the mapped file.

        Raises:
            IndexError: no such record.
            DataError: the record's block is damaged.
        """
        block, place = self._file.find(index)
        start, end = block.residue_offsets[place : place + 2]
        return block.residues[start:end]

    def id(self, index: int) -> str:
        """The id of one record.

        Raises:
            IndexError: no such record.
            DataError: the record's block is damaged.
        """
        block, place = self._file.find(index)
        start, end = block.id_offsets[place : place + 2]
        return block.ids[start:end].tobytes().decode("ascii")

    def verify_blocks(self) -> None:
        """Read every block and check it against the arrays, whatever this process has checked before.

        Raises:
            DataError: a block is damaged or missing.
        """
        self._file.verify_blocks()

    def __getstate__(self) -> dict:
        return {"path": self.path, "manifest": self.manifest, "_opened": None}

    @property
    def _file(self) -> _OpenFile:
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = _open(self.path, self.manifest)
        return self._opened

    def _check_file(self, full: bool) -> None:
        data_file, manifest = self.path / DATA_FILE, self.manifest
        try:
            size = data_file.stat().st_size
            if size != manifest.data_bytes:
                raise DataError(
                    f"{data_file}: {size:,} bytes where the manifest says {manifest.data_bytes:,}: truncated or "
                    f"replaced; {_REMEDY}"
                )
            if index_crc32(data_file, manifest.page_bytes, manifest.index_pages) != manifest.index_crc32:
                raise DataError(f"{data_file}: damaged: the checksum of its index does not hold; {_REMEDY}")
            if full and file_sha256(data_file) != manifest.data_sha256:
                raise DataError(f"{data_file}: damaged: its SHA-256 is not the manifest's; {_REMEDY}")
        except OSError as error:
            raise DataError(f"{data_file}: can't be read: {error.strerror}; {_REMEDY}") from error


class _Block(NamedTuple):
    """Views of one block that was checked; n records.

    Attributes:
        residue_offsets, id_offsets: (n+1,) uint32.
        residues, ids: uint8, end to end.
    """

    residue_offsets: np.ndarray
    id_offsets: np.ndarray
    residues: np.ndarray
    ids: np.ndarray


class _OpenFile:
    """One data.mdb mapped into this process."""

    def __init__(self, path: Path, manifest: StoreManifest) -> None:
        self.pid = os.getpid()
        self._path = path
        self._manifest = manifest
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}
        with self._reading():
            self._environment = lmdb.open(
                str(path),
                readonly=True,
                create=False,
                lock=False,
                readahead=False,
                lib_version=LMDB_MAJOR,
            )
            # Held for the life of the process: its views stay valid, and the file never changes under it.
            self._transaction = self._environment.begin(buffers=True)
        self.lengths = self._array(Kind.LENGTHS, "<u4", manifest.num_records)
        self.hashes = self._array(Kind.HASHES, "<u8", manifest.num_records)
        self._starts: list[int] = self._array(Kind.STARTS, "<u8", manifest.num_blocks).tolist()

    def find(self, index: int) -> tuple[_Block, int]:
        """The block of a record and the record's place in it."""
        if not 0 <= index < self._manifest.num_records:
            raise IndexError(f"record {index} of a store of {self._manifest.num_records}")
        number = bisect_right(self._starts, index) - 1
        block = self._blocks.get(number)
        if block is None:
            with self._lock:
                block = self._blocks[number] = self._read_block(number)
        return block, index - self._starts[number]

    def verify_blocks(self) -> None:
        for number, start in enumerate(self._starts):
            with self._lock:
                block = self._read_block(number)
            lengths = np.diff(block.residue_offsets)
            if not np.array_equal(lengths, self.lengths[start : start + len(lengths)]):
                raise self._damaged(f"block {number} disagrees with the lengths of its records")

    def _read_block(self, number: int) -> _Block:
        found = self._value(key_bytes(number), Kind.BLOCK, f"block {number}")
        ends = [*self._starts[number + 1 : number + 2], self._manifest.num_records]
        if found.first != self._starts[number] or found.num_items != ends[0] - found.first:
            raise self._damaged(f"block {number} holds other records than its place says")
        offsets_bytes = 4 * (found.num_items + 1)
        residue_offsets = np.frombuffer(found.payload, dtype="<u4", count=found.num_items + 1)
        id_offsets = np.frombuffer(found.payload, dtype="<u4", count=found.num_items + 1, offset=offsets_bytes)
        text = np.frombuffer(found.payload, dtype=np.uint8, offset=2 * offsets_bytes)
        num_residues, num_id_bytes = int(residue_offsets[-1]), int(id_offsets[-1])
        if len(text) != num_residues + num_id_bytes:
            raise self._damaged(f"block {number} is not as long as its offsets say")
        return _Block(residue_offsets, id_offsets, text[:num_residues], text[num_residues:])

    def _array(self, kind: Kind, dtype: str, count: int) -> np.ndarray:
        name = f"the array of {kind.name.lower()}"
        found = self._value(kind.key, kind, name)
        if found.num_items != count or len(found.payload) != count * np.dtype(dtype).itemsize:
            raise self._damaged(f"{name} has {found.num_items} elements where the manifest says {count}")
        array = np.frombuffer(found.payload, dtype=dtype)
        # LMDB aligns values that fill pages of their own. A few hundred bytes inside a page it may not: copied.
        aligned = np.require(array, requirements="A")
        aligned.flags.writeable = False
        return aligned

    def _value(self, key: bytes, kind: Kind, name: str) -> Frame:
        with self._reading():
            value = self._transaction.get(key)
        if value is None:
            raise self._damaged(f"{name} is missing")
        try:
            return unframe(value, kind)
        except ValueError as error:
            raise self._damaged(f"{name}: {error}") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self._path / DATA_FILE}: damaged: {problem}; {_REMEDY}")


# By process, device and inode: a store that was replaced is another file under the same path, and LMDB refuses
# to open one file twice. Entries of the parent stay in a forked child untouched, so that nothing closes them there.
_OPEN_FILES: dict[tuple[int, int, int], _OpenFile] = {}
_OPENING = threading.Lock()


def _open(path: Path, manifest: StoreManifest) -> _OpenFile:
    try:
        status = (path / DATA_FILE).stat()
    except OSError as error:
        raise DataError(f"{path / DATA_FILE}: can't be read: {error.strerror}; {_REMEDY}") from error
    key = (os.getpid(), status.st_dev, status.st_ino)
    with _OPENING:
        if key not in _OPEN_FILES:
            if status.st_size != manifest.data_bytes:
                raise DataError(f"{path / DATA_FILE}: {status.st_size:,} bytes: it changed since it was checked")
            _OPEN_FILES[key] = _OpenFile(path, manifest)
        return _OPEN_FILES[key]
