"""The tokens of every record of a store, on disk: made once for each store and tokenizer, then sliced from a map.

Tokenizing text takes longer than reading its tokens, and how long a text is in tokens must be known before batches are
planned. ``manifest.json`` says what the folder holds and carries a SHA-256 of itself; ``tokens.bin`` is the ids of all
records end to end in the smallest unsigned type that holds the vocabulary, and ``lengths.bin`` uint32 how many each
has; both little-endian and without special tokens around a record. The folder's name is made of the checksum of the
store and the fingerprint of the tokenizer.

Shape legend: N records, L tokens of one record, T tokens of all of them.
"""

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from esmeray.common.errors import DataError, parsing
from esmeray.common.progress import ConversionProgress, ProgressCallback, no_progress
from esmeray.common.publishing import exclusive, file_xxh128, published
from esmeray.common.verification import check_file
from esmeray.dataset.fasta.records import stretches
from esmeray.dataset.store.format import read_signed, signed_json
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.base import SequenceTokenizer

MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens.bin"
LENGTHS_FILE = "lengths.bin"

_BLOCK_BYTES = 4 << 20
"""Residues or UTF-8 that are tokenized at once: enough for every core, and little memory."""

_REMEDY = "remove the folder, so that the tokens are made again"


class TokenManifest(BaseModel, extra="forbid", frozen=True):
    """``manifest.json``; ``dtype`` as NumPy writes it."""

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
    """Read access to the tokens; a pickle carries the path and the manifest, each process maps the files itself.

    The manifest's ``prefix`` and ``suffix`` belong before and after each record; :meth:`piece` leaves them out.
    """

    def __init__(self, path: Path | str, verify: Literal["full", "quick"] = "full") -> None:
        """Check the manifest and the files' sizes, in full their checksums as well; map nothing yet.

        Raises DataError where it is no token store, one of another format version, or damaged.
        """
        self.path = Path(path).absolute()
        self.manifest = read_signed(self.path / MANIFEST_FILE, TokenManifest, _REMEDY, "token store")
        # Sizes before anything is mapped: reading past the end of a truncated file would end the process by a signal.
        tokens_bytes = self.manifest.num_tokens * np.dtype(self.manifest.dtype).itemsize
        for name, num_bytes, checksum in (
            (TOKENS_FILE, tokens_bytes, self.manifest.tokens_xxh128),
            (LENGTHS_FILE, 4 * self.manifest.num_records, self.manifest.lengths_xxh128),
        ):
            check_file(self.path / name, _REMEDY, num_bytes=num_bytes, xxh128=checksum if verify == "full" else None)

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """(N,) uint32: tokens of each record, without those that belong before and after it."""
        return _map_file(self.path / LENGTHS_FILE, "<u4", self.manifest.num_records)

    @cached_property
    def _tokens(self) -> NDArray[np.unsignedinteger]:
        return _map_file(self.path / TOKENS_FILE, self.manifest.dtype, self.manifest.num_tokens)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """(N+1,) where each record's tokens start, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def piece(self, record: int, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """(L,) tokens of one record from ``start`` on, a view of the file; IndexError where it ends before."""
        # NumPy would clip a slice beyond the record, or count from the end, and give tokens of another one.
        first, end = self._offsets[record : record + 2].tolist()
        if start < 0 or length < 0 or first + start + length > end:
            raise IndexError(f"tokens {start} to {start + length} of record {record}, which has {end - first}")
        return self._tokens[first + start : first + start + length]

    def __getstate__(self) -> dict[str, Any]:
        # A pickle of a map would carry its content.
        return {"path": self.path, "manifest": self.manifest}


def ensure_tokens(
    store: Store, tokenizer: SequenceTokenizer, root: Path, progress: ProgressCallback = no_progress
) -> TokenStore:
    """The tokens of every record of a store, found under ``root`` or made there.

    The first process makes them, others wait for it; a damaged folder is made again. ``progress`` is called after each
    block of records, with bytes of residues or UTF-8. Raises DataError where the store is damaged, ResourceError where
    the disk is full or can't be written.
    """
    target = root.absolute() / f"{store.checksum[:16]}-{tokenizer.fingerprint[:16]}"
    with exclusive(target):
        with suppress(DataError):  # then made again from the store, whose blocks are checked as they are read
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
    # A byte for ESM-2's 33 tokens, two for most vocabularies of text: the file is what is read in each epoch.
    dtype = np.min_scalar_type(tokenizer.vocabulary_size - 1).newbyteorder("<")
    lengths = np.zeros(len(store), dtype="<u4")
    ends = np.cumsum(store.lengths, dtype=np.int64)
    with (folder / TOKENS_FILE).open("wb") as file:
        for first, last in stretches(store.lengths, _BLOCK_BYTES):
            ids_T, lengths[first:last] = tokenizer.encode([store.text(index) for index in range(first, last)])
            file.write(np.ascontiguousarray(ids_T.astype(dtype)).data)
            progress(ConversionProgress(int(ends[last - 1]), int(ends[-1]), last))
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
