"""Rows that an index gets: records of its sources whose ids it lacks, and the comparison of ids and sequences.

Ids are compared by keys of 24 bytes in a file, a cryptographic digest of the id and its row, and the sequences of equal
ids by both hashes of their keys, 16 bytes in another file.

Shape legend: N rows of the index and its sources, n of a block.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.arrays import scratch_array
from esmeray.dataset.embeddings.manifest import INDEX_ROWS, differ, ranges
from esmeray.dataset.embeddings.reader import Embeddings
from esmeray.inference.index.index import Index


class NewRows(NamedTuple):
    """Records of a source whose ids are in none before it."""

    source: Embeddings
    records: NDArray[np.integer]

    def blocks(self, size: int) -> Iterator[tuple[int, int, NDArray[np.integer]]]:
        """Start and stop of each block of the source that has some of them, and which these are, from its start."""
        for start, stop in ranges(len(self.source), size):
            chosen = self.records[slice(*self.records.searchsorted([start, stop]))]
            if len(chosen):  # else nothing of the block is new, and it is not read
                yield start, stop, chosen - start

    def ids_and_keys(self) -> Iterator[tuple[list[str], NDArray[np.uint64]]]:
        """Their ids and the keys of their sequences (n, 2), in blocks."""
        for start, stop, chosen in self.blocks(INDEX_ROWS):
            ids = self.source.column("id", start, stop).take(chosen).to_pylist()
            yield ids, self.source.sequence_keys_of(start, stop)[chosen]


def new_rows(sources: Sequence[Embeddings], index: Index | None, folder: Path) -> Iterator[NewRows]:
    """Records of each source whose ids the index and the sources before it lack; ``folder`` has room for the keys.

    Raises DataError for sources that the index can't be compared with, and for an id with another sequence than before,
    in its own source, too.
    """
    tables: list[Index | Embeddings] = [*sources] if index is None else [index, *sources]
    for source in sources:
        source.refuse_other_space(tables[0])
    # Rows of all are numbered through.
    firsts = np.cumsum([0, *map(len, tables)]).tolist()
    keys = scratch_array(folder, [firsts[-1]], "S24")
    sequences_N2 = scratch_array(folder, [firsts[-1], 2], np.uint64)
    for first, table in zip(firsts, tables, strict=False):
        for start, ids, sequences_n2 in _blocks(table):
            rows = slice(first + start, first + start + len(ids))
            # The row comes last, so that among equal ids the earliest row comes first.
            keys[rows] = [_digest(name) + row.to_bytes(8) for row, name in enumerate(ids, rows.start)]
            sequences_N2[rows] = sequences_n2
    keys.sort()
    for source, first in zip(sources, firsts[-1 - len(sources) :], strict=False):
        records = scratch_array(folder, [len(source)], np.min_scalar_type(len(source)))
        new = 0
        for start, ids, sequences_n2 in _blocks(source):
            earliest_n = keys[keys.searchsorted([*map(_digest, ids)])].view(">u8")[2::3].astype(np.int64)
            is_other_n = differ(sequences_N2[earliest_n], sequences_n2)
            if is_other_n.any():
                other = int(is_other_n.argmax())
                owner = tables[np.searchsorted(firsts, earliest_n[other], side="right") - 1]
                raise DataError(
                    f"{source.source}: {ids[other]!r} is another sequence than in {owner.source}; give it another id"
                )
            chosen = start + np.flatnonzero(earliest_n >= first)
            records[new : new + len(chosen)] = chosen
            new += len(chosen)
        yield NewRows(source, records[:new])


def _blocks(table: Index | Embeddings) -> Iterator[tuple[int, list[str], NDArray[np.uint64]]]:
    """Start, ids and keys of sequences (n, 2) of each block of rows."""
    for start, stop in ranges(len(table), INDEX_ROWS):
        if isinstance(table, Index):
            yield start, table.ids(range(start, stop)), table.sequences(np.arange(start, stop))
        else:
            yield start, table.column("id", start, stop).to_pylist(), table.sequence_keys_of(start, stop)


def _digest(record_id: str) -> bytes:
    """16 bytes of BLAKE2b, for which no collision is known; XXH3 collisions can be constructed."""
    return blake2b(record_id.encode(), digest_size=16).digest()
