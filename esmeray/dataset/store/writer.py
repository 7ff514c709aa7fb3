"""Write clean blocks to ``data.mdb``, a transaction each, in a map that grows as it fills.

In: :class:`~esmeray.dataset.store.ingest.CleanBlock` in order. Out: the files of a store
(:mod:`esmeray.dataset.store.format`) in a folder that the caller creates and renames. The manifest is written last.

A background thread checksums and writes one block while the next one is parsed; the CRC-32, LMDB and the system
release the GIL. Its errors are raised by the next call that writes.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from esmeray.common.background_thread import BackgroundThread
from esmeray.common.errors import DataError
from esmeray.common.publishing import disk_full, file_xxh128
from esmeray.dataset.fasta.alphabet import STORE_ALPHABET
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.reader import BATCH_BYTES
from esmeray.dataset.fasta.records import Lines, lengths_of, stretches
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store import format as layout
from esmeray.dataset.store.ingest import CleanBlock

MAP_BYTES = 1 << 30
"""Initial size of LMDB's map; doubled when it is full. It is address space, not disk."""

REOPEN_BYTES = 16 << 20
"""Bytes written through one mapping before the file is reopened. This bounds the memory of a conversion."""


class StoreWriter:
    """Writes one store into an empty folder."""

    def __init__(self, folder: Path, target: Path, alphabet: str = STORE_ALPHABET) -> None:
        """Create data.mdb in ``folder``; ``target`` is the store's final path, for messages."""
        self._folder = folder
        self._alphabet = alphabet
        self._target = target
        self._environment = self._open(MAP_BYTES)
        self._mapped_bytes = 0
        self._thread: BackgroundThread[None] = BackgroundThread()
        self._num_records = 0
        self._starts: list[int] = []
        self._lengths: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._ids_sha256 = hashlib.sha256()

    def add(self, block: CleanBlock) -> None:
        """Append a block. Raises ResourceError if the disk is full."""
        parts: list[bytes | memoryview] = [
            _offsets(block.lengths),
            _offsets(block.ids.lengths),
            block.residues,
            block.ids.joined(),
        ]
        # A value holds 4 GiB. A block is one batch, and the only large record in it has at most 2 GiB.
        num_bytes = sum(map(len, parts)) + layout.HEADER_BYTES
        # Framed, and so checksummed, by the writing thread.
        framed = partial(layout.frame, layout.Kind.BLOCK, self._num_records, len(block.lengths), parts)
        self._put(layout.key_bytes(len(self._starts)), framed, num_bytes)
        self._starts.append(self._num_records)
        self._lengths.append(block.lengths)
        self._hashes.append(block.hashes)
        self._num_records += len(block.lengths)
        self._ids_sha256.update(block.ids.text)

    def finish(
        self, source: list[SourceFile] | layout.SampleSource, ingest: IngestSection, counts: IngestCounts
    ) -> layout.StoreManifest:
        """Write the arrays, sync, and write the manifest.

        Raises DataError if no record was added or there are more than a store can hold; ResourceError if the disk is
        full.
        """
        if not self._num_records:
            raise DataError(
                f"{self._target}: no records left after the data.ingest settings were applied, so no store was written"
            )
        lengths, hashes = _joined(self._lengths), _joined(self._hashes)
        self._put_array(layout.Kind.LENGTHS, lengths)
        self._put_array(layout.Kind.HASHES, hashes)
        self._put_array(layout.Kind.STARTS, np.array(self._starts, dtype=np.uint64))
        page_bytes = self._environment.stat()["psize"]
        # Sync in the background while the checksums below are read back from the page cache.
        self._thread.begin(partial(self._environment.sync, True))
        # A checksum of the content, not of the file: LMDB's page layout depends on how much was written at once.
        content = hashlib.sha256(_bytes(lengths))
        content.update(_bytes(hashes))
        content.update(self._ids_sha256.digest())
        data_file = self._folder / layout.DATA_FILE
        pages = layout.find_index_pages(data_file, page_bytes)
        manifest = layout.StoreManifest(
            num_records=self._num_records,
            num_residues=int(lengths.sum(dtype=np.int64)),
            num_blocks=len(self._starts),
            alphabet=self._alphabet,
            checksum=content.hexdigest(),
            data_bytes=data_file.stat().st_size,
            data_xxh128=file_xxh128(data_file),
            page_bytes=page_bytes,
            index_pages=pages,
            index_crc32=layout.index_crc32(data_file, page_bytes, pages),
            source=source,
            ingest=ingest,
            counts=counts,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        with self._disk():
            self._thread.wait()
        self.close()
        # Last: a folder without a manifest is not a store.
        (self._folder / layout.MANIFEST_FILE).write_text(layout.signed_json(manifest), encoding="utf-8")
        return manifest

    def close(self) -> None:
        """Close data.mdb, finished or not."""
        self._thread.close()  # first, since it may be writing through the environment
        self._environment.close()

    def _put_array(self, kind: layout.Kind, array: np.ndarray) -> None:
        if array.nbytes + layout.HEADER_BYTES > layout.MAX_VALUE_BYTES:
            raise DataError(
                f"the {kind.name.lower()} of {self._num_records:,} records need {array.nbytes:,} bytes, more "
                "than LMDB's limit of 4 GiB per value; split the source"
            )
        self._put(kind.key, partial(layout.frame, kind, 0, len(array), [_bytes(array)]), array.nbytes)
        self._thread.wait()

    def _put(self, key: bytes, framed: Callable[[], bytes], num_bytes: int) -> None:
        """Start writing a value, which ``framed`` returns, after the previous one was written."""
        self._thread.begin(partial(self._write, key, framed, num_bytes))

    def _write(self, key: bytes, framed: Callable[[], bytes], num_bytes: int) -> None:
        """Write one value in a transaction; double the map and retry as long as it is full."""
        value = framed()
        while True:
            try:
                with self._disk(), self._environment.begin(write=True) as transaction:
                    transaction.put(key, value, append=True)  # ascending keys, so no page needs splitting
                break
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])
        self._mapped_bytes += num_bytes
        if self._mapped_bytes >= REOPEN_BYTES:
            self._unmap()

    def _open(self, map_size: int) -> lmdb.Environment:
        # No lock file, because the folder is private to this process. One sync before the renaming is enough.
        with self._disk():
            return lmdb.open(
                os.fsencode(self._folder),  # lmdb (3.0) encodes a str by the locale, strictly
                map_size=map_size,
                lock=False,
                sync=False,
                metasync=False,
                lib_version=layout.LMDB_MAJOR,
            )

    def _unmap(self) -> None:
        """Reopen the file: the pages around each leaf that was touched count as this process's memory until then."""
        map_size = self._environment.info()["map_size"]  # which may have grown
        self._environment.close()
        self._environment = self._open(map_size)
        self._mapped_bytes = 0

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Convert LMDB's errors: LMDB 0.9 reports a full disk as any of them, e.g. 'Input/output error'."""
        try:
            yield
        except lmdb.MapFullError:
            raise  # not an error: the caller enlarges the map
        except lmdb.Error as error:
            raise disk_full(self._target, str(error)) from error


def write_sequences(
    folder: Path,
    target: Path,
    ids: list[str],
    texts: list[bytes],
    hashes_N: NDArray[np.uint64],
    source: list[SourceFile] | layout.SampleSource,
    ingest: IngestSection,
    counts: IngestCounts,
    alphabet: str = STORE_ALPHABET,
) -> str:
    """Write clean records as the store within ``folder``, which will be renamed ``target``. Return its checksum."""
    (folder / layout.SEQUENCES_FOLDER).mkdir()
    with closing(StoreWriter(folder / layout.SEQUENCES_FOLDER, target / layout.SEQUENCES_FOLDER, alphabet)) as writer:
        # Blocks of the same size as from FASTA files, so that reading is as fast.
        for start, end in stretches(lengths_of(texts), BATCH_BYTES):
            block_texts = texts[start:end]
            lines = Lines.of([record_id.encode("utf-8") for record_id in ids[start:end]])
            writer.add(CleanBlock(lines, b"".join(block_texts), lengths_of(block_texts), hashes_N[start:end]))
        return writer.finish(source, ingest, counts).checksum


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return the parts concatenated. The list is emptied, so that only one copy stays in memory."""
    joined = np.concatenate(parts)
    parts.clear()
    return joined


def _offsets(lengths: np.ndarray) -> memoryview:
    """Return (n+1,) uint32: the start of each of n pieces, and the end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.uint32)
    np.cumsum(lengths, out=offsets[1:])
    return _bytes(offsets)


def _bytes(array: np.ndarray) -> memoryview:
    # Stores are little-endian, like every machine that torch supports.
    return np.ascontiguousarray(array).data.cast("B")
