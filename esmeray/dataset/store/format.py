"""Layout of a store on disk: the manifest, and the framing of values in LMDB.

``manifest.json`` is written last. It holds a SHA-256 of itself, the size and XXH3-128 of ``data.mdb``, and a CRC-32
of the pages that LMDB follows to find values (its two meta pages and its B-tree). A damaged pointer is therefore
detected before LMDB maps the file and follows the pointer out of the map.

``data.mdb`` is LMDB in the 0.9 format. Keys are 8-byte big-endian integers: blocks of sequences from 0 on, then, at
:data:`FIRST_ARRAY_KEY` and up, three arrays over all records or blocks. Every value is a frame: a header of
40 bytes with a CRC-32 of header and payload, then the payload, little-endian:

=========== ========================================================================================================
kind        payload
=========== ========================================================================================================
BLOCK       n records: residue_offsets (n+1) uint32, id_offsets (n+1) uint32, residues in ASCII, ids in UTF-8
LENGTHS     (N,) uint32, residues of each record
HASHES      (N,) uint64, XXH3-64 (seed 0) of each sequence's residues
STARTS      (blocks,) uint64, index of the first record of each block
=========== ========================================================================================================

A store of texts (alphabet :data:`TEXT_ALPHABET`) holds UTF-8 in place of residues; all lengths are then in bytes.
"""

import hashlib
import json
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from esmeray.common.errors import DataError, parsing, read_json
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.section import IngestSection, SampleSection
from esmeray.train_config.removed import stored_in

try:  # xopen brings it on x86-64 and 64-bit Arm; the same CRC-32 at 23 GB/s per core, zlib's has 4 GB/s
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

Manifest = TypeVar("Manifest", bound=BaseModel)

FORMAT_VERSION = 2
LMDB_MAJOR = 0
"""``lib_version`` of py-lmdb for the 0.9 engine; LMDB 1.0 writes another file format."""

TEXT_ALPHABET = "utf-8"
"""``alphabet`` of a store of texts."""

DATA_FILE = "data.mdb"
MANIFEST_FILE = "manifest.json"
SEQUENCES_FOLDER = "sequences"
"""The store within a folder of labelled sequences or of structures."""
STORE_REMEDY = "convert the FASTA again, or copy the store again"
MADE_AGAIN = "remove it; it will be built again from its source"

FIRST_ARRAY_KEY = 1 << 63
MAX_VALUE_BYTES = 0xFFFFFFFF
"""LMDB's maximum size of a value. With hashes of 8 bytes, a store holds at most 536,870,906 records."""

_MAGIC = b"ESMR"
# magic, format version, kind, first record, count, payload bytes, reserved, CRC-32 of the fields before and the payload
_HEADER = struct.Struct("<4sHHQQQII")
HEADER_BYTES = _HEADER.size
_CRC_AT = HEADER_BYTES - 4

# LMDB 0.9's MDB_page on a 64-bit machine: page number, padding, flags, number of pages of a large value.
_PAGE_HEADER = struct.Struct("<QHHI")
_OVERFLOW_PAGE = 0x04
"""Flag of the first page of a value that is too large for a leaf."""


class Kind(IntEnum):
    """Kind of content of a value."""

    BLOCK = 1
    LENGTHS = 2
    HASHES = 3
    STARTS = 4

    @property
    def key(self) -> bytes:
        """LMDB key of an array's value."""
        return key_bytes(FIRST_ARRAY_KEY + int(self))


def key_bytes(key: int) -> bytes:
    """Return a key as big-endian bytes, so that LMDB's byte order is the order of the integers."""
    return key.to_bytes(8, "big")


def frame(kind: Kind, first: int, count: int, parts: list[bytes | memoryview]) -> bytes:
    """Return header and payload as the bytes of one value."""
    # The CRC-32 is the last field, so that it covers the other fields: a wrong count would read past the block.
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, kind, first, count, sum(map(len, parts)), 0, 0)[:_CRC_AT]
    crc = crc32(header)
    # Piece by piece: joining first would copy each block once more.
    for piece in parts:
        crc = crc32(piece, crc)
    return b"".join([header, crc.to_bytes(4, "little"), *parts])


def unframe(value: memoryview) -> tuple[int, memoryview]:
    """Check a value's CRC-32. Return the number of records or elements and a zero-copy view of the payload.

    Raises ValueError with the problem; the reader adds the value and the file.
    """
    # The checksum covers the header, and the index's checksum the size and the position of the value.
    *_, count, _, _, crc = _HEADER.unpack_from(value)
    payload = value[HEADER_BYTES:]
    if crc32(payload, crc32(value[:_CRC_AT])) != crc:
        raise ValueError("checksum mismatch")
    return count, payload


class SampleSource(SampleSection):
    """Settings of the embedded sample that a store was made from. ``seed``: 0, or of an earlier version any number."""

    seed: int = 0
    generator_version: int


class StoreManifest(BaseModel, extra="forbid", frozen=True):
    """``manifest.json``.

    Attributes:
        alphabet: the allowed letters of residues, or :data:`TEXT_ALPHABET`.
        page_bytes: LMDB's page size.
        checksum: SHA-256 of the content (lengths, sequence hashes, SHA-256 of the ids), independent of the file layout.
        index_pages: pages of data.mdb that LMDB follows; all other pages hold values.
        index_crc32: CRC-32 of the index pages, concatenated.
        source: the FASTA files, or the settings of the sample.
        ingest: the policies that were applied to the records.
        counts: counts of what the policies and the fixed repairs did.
        created: UTC, ISO 8601.
    """

    format: Literal["esmeray-store"] = "esmeray-store"
    format_version: Literal[2] = 2
    engine: Literal["lmdb-0.9"] = "lmdb-0.9"
    num_records: int
    num_residues: int
    num_blocks: int
    alphabet: str
    checksum: str
    data_bytes: int
    data_xxh128: str
    page_bytes: int
    index_pages: list[int]
    index_crc32: int
    source: list[SourceFile] | SampleSource
    ingest: IngestSection
    counts: IngestCounts
    created: str


def signed_json(manifest: BaseModel) -> str:
    """Return a manifest as JSON, with the checksum of its own content."""
    content = manifest.model_dump(mode="json")
    return json.dumps({"manifest_sha256": _digest(content), **content}, indent=1) + "\n"


def read_signed(path: Path, model: type[Manifest], remedy: str, kind: str = "store", advice: str = "") -> Manifest:
    """Read a manifest that :func:`signed_json` wrote, and check its checksum, format and version.

    Raises DataError with ``remedy`` if the manifest is damaged or of another format or version. If it is missing, the
    error has ``advice`` (default: ``remedy``), and ``kind`` as the name of the expected folder.
    """
    if not path.is_file():
        problem = f"not a {kind}, it has no {path.name}" if path.parent.exists() else "no such folder"
        raise DataError(f"{path.parent}: {problem}; {advice or remedy}")
    wanted, readable = (model.model_fields[name].default for name in ("format", "format_version"))
    content = read_json(path, remedy)
    with parsing(path, remedy):
        if content.get("format") != wanted:
            raise ValueError(f"its format is not {wanted!r}")
        # Before the checksum and the fields: in other versions they may differ without being damaged.
        version = content.get("format_version")
        if version != readable:
            raise DataError(
                f"{path.parent}: format version {version!r}, but this version of Esmeray reads {readable}; {remedy}"
            )
        if content.pop("manifest_sha256", None) != _digest(content):
            raise ValueError("checksum mismatch")
        return model.model_validate(content, context=stored_in(path))


def find_index_pages(data_file: Path, page_bytes: int) -> list[int]:
    """Return the numbers of the pages of an LMDB file that hold no values. Values are jumped over, not read."""
    pages = []
    num_pages = data_file.stat().st_size // page_bytes
    # Unbuffered, because only sixteen bytes per value are read, of gigabytes.
    with data_file.open("rb", buffering=0) as file:
        page = 0
        while page < num_pages:
            file.seek(page * page_bytes)
            _, _, flags, overflow_pages = _PAGE_HEADER.unpack(file.read(_PAGE_HEADER.size))
            if flags & _OVERFLOW_PAGE:
                page += max(overflow_pages, 1)  # at least one, so that the walk ends for any content
            else:
                pages.append(page)
                page += 1
    return pages


def index_crc32(data_file: Path, page_bytes: int, pages: list[int]) -> int:
    """Return the CRC-32 of these pages, concatenated."""
    crc = 0
    with data_file.open("rb", buffering=0) as file:
        for page in pages:
            file.seek(page * page_bytes)
            crc = crc32(file.read(page_bytes), crc)
    return crc


def _digest(content: dict[str, Any]) -> str:
    # Independent of the JSON layout: sorted keys, no blanks.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
