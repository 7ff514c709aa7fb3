"""Read a store: read-only views of residues, ids, lengths and hashes in the file that LMDB maps.

LMDB must not read over a network file system; :func:`stage_store` copies a store to the node's own disk.

A file's size, meta pages and B-tree are checked before LMDB opens it, because a truncated file would end the process
by a signal. A block's CRC-32 is checked when a process first reads the block.

A process opens a file when it first needs it, once for all stores of that file, and keeps it open until it exits: views
are valid only while the environment is open. Pickling and forking don't carry an environment over.

Shape legend: N records of the store or of a batch, B blocks of the store, L residues of one record.
"""

import functools
import os
import shutil
import threading
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import FORKED, DataError, ForkedError, UnknownRecordError, expanded, parsing, reading
from esmeray.common.publishing import check_file, disk_full, exclusive, published
from esmeray.dataset.fasta.records import keys_of
from esmeray.dataset.store import format as layout

_ADVICE = "build one with: esmeray data convert --data.source FASTA --convert.store STORE"


def open_store(folder: Path | str) -> "Store":
    """Open a store made by ``esmeray data convert``. Raises DataError if it is missing or damaged.

    >>> store = esmeray.open_store("proteins.store")
    >>> len(store), store.id(0), store.text(0)
    (3, 'first', 'MKTAYIAKQR')
    """
    return Store(expanded(folder))


class Store:
    """Read access to a store.

    A pickle holds the path and the manifest. A store may cross a fork if its file was not opened before. Methods that
    read a record raise UnknownRecordError (an IndexError) if there is no such record, and DataError if its block is
    damaged.

    Attributes:
        checksum: hex identity of the content; equal for equal records in the same order.
        is_text: True if the records are texts, not residues.
    """

    def __init__(self, path: Path | str, verify: Literal["full", "quick"] = "quick") -> None:
        """Check a store without mapping it. Raises DataError if it is missing, damaged or of another format.

        ``verify`` quick checks the manifest, the file's size and the pages that LMDB follows. Full also reads the whole
        file once to check its XXH3-128.
        """
        self.path = Path(path).absolute()
        self.manifest = layout.read_signed(
            self.path / layout.MANIFEST_FILE, layout.StoreManifest, layout.STORE_REMEDY, advice=_ADVICE
        )
        self.checksum = self.manifest.checksum
        self.is_text = self.manifest.alphabet == layout.TEXT_ALPHABET
        self._opened: _OpenFile | None = None
        data_file = self.path / layout.DATA_FILE
        checksum = self.manifest.data_xxh128 if verify == "full" else None
        check_file(data_file, layout.STORE_REMEDY, num_bytes=self.manifest.data_bytes, xxh128=checksum)
        # The pages that LMDB follows: a damaged pointer would end the process by a signal.
        with parsing(data_file, layout.STORE_REMEDY):
            crc32 = layout.index_crc32(data_file, self.manifest.page_bytes, self.manifest.index_pages)
            if crc32 != self.manifest.index_crc32:
                raise DataError(f"{data_file}: damaged: checksum mismatch in its index; {layout.STORE_REMEDY}")

    def __len__(self) -> int:
        return self.manifest.num_records

    @property
    def lengths(self) -> np.ndarray:
        """(N,) uint32: residues of each record; in a store of texts, bytes of UTF-8."""
        return self._file.lengths

    @property
    def sequence_hashes(self) -> np.ndarray:
        """(N,) uint64: XXH3-64 of each sequence. Equal sequences have equal hashes in all stores."""
        return self._file.hashes

    def sequence_keys(self, records_N: NDArray[np.integer]) -> NDArray[np.uint64]:
        """(N, 2) uint64: cache key of each record's sequence; the first column is :attr:`sequence_hashes`."""
        return keys_of(self.sequence(record) for record in records_N.tolist())

    def sequence(self, index: int) -> np.ndarray:
        """(L,) uint8: residues of a record in ASCII (or a text in UTF-8), a read-only view of the mapped file."""
        block, row = self._file.find(index)
        start, end = block.residue_offsets[row : row + 2]
        return np.frombuffer(block.residues[start:end], dtype=np.uint8)

    def text(self, index: int) -> str:
        """Return the residues or the text of a record as a string."""
        return self.sequence(index).tobytes().decode("utf-8")

    def windows(
        self, records_N: NDArray[np.int64], starts_N: NDArray[np.int64], lengths_N: NDArray[np.int64]
    ) -> list[memoryview]:
        """Return ``lengths_N`` residues from ``starts_N`` on of N records, as read-only views of the mapped file."""
        return self._file.windows(records_N, starts_N, lengths_N)

    def id(self, index: int) -> str:
        block, row = self._file.find(index)
        start, end = block.id_offsets[row : row + 2]
        return bytes(block.ids[start:end]).decode("utf-8")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_opened": None}

    @property
    def _file(self) -> "_OpenFile":
        # A fork inherits the object, but LMDB's environment does not survive the fork.
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = _open(self.path, self.manifest)
        return self._opened


class _Block(NamedTuple):
    """Views of a verified block of n records: (n+1,) uint32 offsets, and the concatenated bytes."""

    residue_offsets: memoryview
    id_offsets: memoryview
    residues: memoryview
    ids: memoryview


class _OpenFile:
    """A data.mdb that LMDB has mapped into this process."""

    def __init__(self, path: Path, manifest: layout.StoreManifest) -> None:
        self.pid = os.getpid()
        self._path, self._manifest = path, manifest
        # Again, because the file may have changed meanwhile.
        check_file(path / layout.DATA_FILE, layout.STORE_REMEDY, num_bytes=manifest.data_bytes)
        try:
            # Read-ahead stays on: the checksum reads whole blocks, which takes five times as long page by page.
            environment = lmdb.open(os.fsencode(path), readonly=True, lock=False, lib_version=layout.LMDB_MAJOR)
            self._transaction = environment.begin(buffers=True)  # zero-copy views; kept open because they depend on it
        except lmdb.Error as error:
            raise self._damaged(str(error)) from error
        self._reading = threading.Lock()  # a transaction serves one thread at a time
        self._blocks: dict[int, _Block] = {}
        self.lengths = self._array(layout.Kind.LENGTHS, "<u4")
        # Both forms: NumPy finds the blocks of a whole batch at once; bisect has less overhead for a single record.
        self._starts_B = self._array(layout.Kind.STARTS, "<u8").astype(np.int64)
        self._starts: list[int] = self._starts_B.tolist()
        # (N,) offset of each record's residues in its block, set once the block is read.
        self._begins = np.zeros(manifest.num_records, dtype=np.uint32)

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        """(N,) uint64; read on first use, which never happens in loader processes."""
        return self._array(layout.Kind.HASHES, "<u8")

    def find(self, index: int) -> tuple[_Block, int]:
        if not (hasattr(index, "__index__") and 0 <= index < self._manifest.num_records):
            raise UnknownRecordError(
                f"{self._path}: record {index} requested, but the store has {self._manifest.num_records}"
            )
        number = bisect_right(self._starts, index) - 1
        return self.block(number), index - self._starts[number]

    def windows(
        self, records_N: NDArray[np.int64], starts_N: NDArray[np.int64], lengths_N: NDArray[np.int64]
    ) -> list[memoryview]:
        # One comparison for all: negative numbers are the largest as unsigned integers.
        if records_N.view(np.uint64).max(initial=0) >= self._manifest.num_records:
            raise UnknownRecordError(
                f"{self._path}: records {records_N.min()} to {records_N.max()} requested, but the store has "
                f"{self._manifest.num_records}"
            )
        blocks_N = self._starts_B.searchsorted(records_N, side="right") - 1
        # Skipped once every block has been read.
        if len(self._blocks) < len(self._starts):
            for number in set(blocks_N.tolist()):
                self.block(number)
        begins_N = self._begins[records_N] + starts_N
        parts = zip(blocks_N.tolist(), begins_N.tolist(), (begins_N + lengths_N).tolist(), strict=True)
        return [self._blocks[number].residues[begin:end] for number, begin, end in parts]

    def block(self, number: int) -> _Block:
        """Return a block that is verified on first use."""
        block = self._blocks.get(number)
        if block is None:  # two threads may both read it, with the same result
            block = self._read_block(number)
            first = self._starts[number]
            self._begins[first : first + len(block.residue_offsets) - 1] = block.residue_offsets[:-1]
            self._blocks[number] = block
        return block

    def _read_block(self, number: int) -> _Block:
        num_records, payload = self._value(layout.key_bytes(number), f"block {number}")
        offsets_bytes = 4 * (num_records + 1)
        residue_offsets = payload[:offsets_bytes].cast("I")
        id_offsets = payload[offsets_bytes : 2 * offsets_bytes].cast("I")
        text = payload[2 * offsets_bytes :]
        num_residues = residue_offsets[-1]
        return _Block(residue_offsets, id_offsets, text[:num_residues], text[num_residues:])

    def _array(self, kind: layout.Kind, dtype: str) -> np.ndarray:
        _, payload = self._value(kind.key, f"the array {kind.name.lower()}")
        # LMDB aligns values that fill pages of their own, but maybe not small values inside a page; these are copied.
        aligned = np.require(np.frombuffer(payload, dtype=dtype), requirements="A")
        aligned.flags.writeable = False
        return aligned

    def _value(self, key: bytes, name: str) -> tuple[int, memoryview]:
        with self._reading:
            value = self._transaction.get(key)
        assert value is not None  # the checksum of the index has shown that it is there
        try:
            return layout.unframe(value)
        except ValueError as error:
            raise self._damaged(f"{name}: {error}") from error

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self._path / layout.DATA_FILE}: damaged: {problem}; {layout.STORE_REMEDY}")


# Keyed by device and inode, because a replaced store is another file. LMDB opens a file only once per process.
_OPEN_FILES: dict[tuple[int, int], _OpenFile] = {}
_OPENING = threading.Lock()


def _open(path: Path, manifest: layout.StoreManifest) -> _OpenFile:
    # Locked, because LMDB must not open a file twice in a process.
    with reading(path / layout.DATA_FILE, layout.STORE_REMEDY), _OPENING:
        status = (path / layout.DATA_FILE).stat()
        key = (status.st_dev, status.st_ino)
        if key not in _OPEN_FILES:
            _OPEN_FILES[key] = _OpenFile(path, manifest)
        opened = _OPEN_FILES[key]
    if opened.pid != os.getpid():
        raise ForkedError(f"{path}: {FORKED}")
    return opened


def stage_store(store_path: Path, stage_dir: Path) -> Path:
    """Copy a store to ``stage_dir``, unless a good copy exists, and verify it in full. Other processes wait.

    Raises DataError if the store is damaged, ResourceError if the node's disk is full or not writable.
    """
    store = Store(store_path)
    # Named by content: a rebuilt store of the same name gets another copy, and the old copy stays valid.
    name = f"{store.path.name}-{store.manifest.data_xxh128[:16]}"
    target = Path(os.path.abspath(stage_dir)) / name  # noqa: PTH100
    with exclusive(target):
        with suppress(DataError):  # a damaged copy is replaced from the original, which is verified below
            return Store(target, verify="full").path
        # Before copying: a large store takes minutes to copy, and a full disk would affect all users of the node.
        if shutil.disk_usage(target.parent).free < store.manifest.data_bytes:
            raise disk_full(target, f"staging needs {store.manifest.data_bytes / 1000000000.0:.1f} GB")
        with published(target) as folder:
            for file_name in (layout.DATA_FILE, layout.MANIFEST_FILE):
                shutil.copyfile(store.path / file_name, folder / file_name)
            Store(folder, verify="full")  # verified before the renaming, so that only a good copy gets the name
    return target


stage_once = functools.cache(stage_store)
""":func:`stage_store` once per process, because it reads the whole copy and profilers open it often."""
