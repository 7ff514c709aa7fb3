"""Tokens of all records of a store on disk: made once per store and tokenizer, then read from a memory map.

Tokenizing takes longer than reading tokens, and planning batches needs the number of tokens of each text. The folder's
name is built from the checksum of the store and the fingerprint of the tokenizer. It holds:

- ``manifest.json``: the description of the folder, with a SHA-256 of itself
- ``tokens.bin``: the ids of all records, concatenated, in the smallest unsigned type that holds the vocabulary
- ``lengths.bin``: the number of tokens per record, uint32

Both binary files are little-endian. Special tokens around a record are not stored.

Shape legend: N records, L tokens of one record, T tokens of all records.
"""

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from esmeray.common.errors import DataError, parsing
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.common.publishing import check_file, exclusive, file_xxh128, published
from esmeray.dataset.fasta.records import stretches
from esmeray.dataset.store.format import read_signed, signed_json
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.base import SequenceTokenizer

MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens.bin"
LENGTHS_FILE = "lengths.bin"

_BLOCK_BYTES = 4 << 20
"""Bytes of residues or UTF-8 that are tokenized at once: enough work for all cores, and little memory."""

_REMEDY = "remove the folder; the tokens will be computed again"


class TokenManifest(BaseModel, extra="forbid", frozen=True):
    """Content of ``manifest.json``; ``dtype`` is a NumPy type string."""

    format: Literal["esmeray-tokens"] = "esmeray-tokens"
    format_version: Literal[1] = 1
    store_checksum: str
    fingerprint: str
    num_records: int
    num_tokens: int
    dtype: Literal["|u1", "<u2", "<u4"]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int
    tokens_xxh128: str
    lengths_xxh128: str


class TokenStore:
    """Read access to tokens. A pickle holds the path and the manifest; each process maps the files itself.

    :meth:`piece` returns tokens without the manifest's ``prefix`` and ``suffix``, which belong around each record.
    """

    def __init__(self, path: Path | str, verify: Literal["full", "quick"] = "full") -> None:
        """Check the manifest and the files' sizes, and with ``verify`` full also their checksums. Nothing is mapped.

        Raises DataError if the folder is not a token store, is damaged or of another format version.
        """
        self.path = Path(path).absolute()
        self.manifest = read_signed(self.path / MANIFEST_FILE, TokenManifest, _REMEDY, "token store")
        # Sizes before mapping: reading past the end of a truncated file would end the process by a signal.
        tokens_bytes = self.manifest.num_tokens * np.dtype(self.manifest.dtype).itemsize
        for name, num_bytes, checksum in (
            (TOKENS_FILE, tokens_bytes, self.manifest.tokens_xxh128),
            (LENGTHS_FILE, 4 * self.manifest.num_records, self.manifest.lengths_xxh128),
        ):
            check_file(self.path / name, _REMEDY, num_bytes=num_bytes, xxh128=checksum if verify == "full" else None)

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """(N,) uint32: number of tokens per record, without prefix and suffix."""
        return _map_file(self.path / LENGTHS_FILE, "<u4", self.manifest.num_records)

    @cached_property
    def _tokens(self) -> NDArray[np.unsignedinteger]:
        return _map_file(self.path / TOKENS_FILE, self.manifest.dtype, self.manifest.num_tokens)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """(N+1,) start of each record's tokens, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def piece(self, record: int, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """Return (L,) tokens of one record from ``start`` on, a view of the file. Raises IndexError beyond its end."""
        # NumPy would clip an index out of range or count from the end, and return tokens of another record.
        first, end = self._offsets[record : record + 2].tolist()
        if start < 0 or length < 0 or first + start + length > end:
            raise IndexError(
                f"tokens {start} to {start + length} of record {record} requested, but it has {end - first}"
            )
        return self._tokens[first + start : first + start + length]

    def __getstate__(self) -> dict[str, Any]:
        # Without the maps, whose content would be pickled.
        return {"path": self.path, "manifest": self.manifest}


def ensure_tokens(
    store: Store, tokenizer: SequenceTokenizer, root: Path, progress: ProgressCallback = no_progress
) -> TokenStore:
    """Return the tokens of all records of a store; make them under ``root`` if they don't exist.

    The first process makes them, and others wait for it. A damaged folder is rebuilt. ``progress`` is called after each
    block of records, with bytes of residues or UTF-8. Raises DataError if the store is damaged, ResourceError if the
    disk is full or not writable.
    """
    target = root.absolute() / f"{store.checksum[:16]}-{tokenizer.fingerprint[:16]}"
    with exclusive(target):
        with suppress(DataError):  # rebuilt below from the store, whose blocks are verified when they are read
            tokens = TokenStore(target)
            if (tokens.manifest.store_checksum, tokens.manifest.fingerprint) == (store.checksum, tokenizer.fingerprint):
                return tokens
        with published(target) as folder:
            _write(folder, store, tokenizer, progress)
        return TokenStore(target, verify="quick")


def _map_file(path: Path, dtype: str, count: int) -> NDArray[Any]:
    if not count:  # an empty file can't be mapped
        return np.empty(0, dtype=dtype)
    with parsing(path, _REMEDY):
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def _write(folder: Path, store: Store, tokenizer: SequenceTokenizer, progress: ProgressCallback) -> None:
    # One byte for ESM-2's 33 tokens, two for most text vocabularies: small, because every epoch reads this file.
    dtype = np.min_scalar_type(tokenizer.vocabulary_size - 1).newbyteorder("<")
    lengths = np.zeros(len(store), dtype="<u4")
    ends = np.cumsum(store.lengths, dtype=np.int64)
    with (folder / TOKENS_FILE).open("wb") as file:
        for first, last in stretches(store.lengths, _BLOCK_BYTES):
            ids_T, lengths[first:last] = tokenizer.encode([store.text(index) for index in range(first, last)])
            file.write(np.ascontiguousarray(ids_T.astype(dtype)).data)
            progress(int(ends[last - 1]), int(ends[-1]), last)
    (folder / LENGTHS_FILE).write_bytes(lengths.tobytes())
    manifest = TokenManifest(
        store_checksum=store.checksum,
        fingerprint=tokenizer.fingerprint,
        num_records=len(store),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        dtype=dtype.str,  # type: ignore[arg-type]
        prefix=tokenizer.prefix,
        suffix=tokenizer.suffix,
        pad=tokenizer.pad,
        tokens_xxh128=file_xxh128(folder / TOKENS_FILE),
        lengths_xxh128=file_xxh128(folder / LENGTHS_FILE),
    )
    (folder / MANIFEST_FILE).write_text(signed_json(manifest), encoding="utf-8")
