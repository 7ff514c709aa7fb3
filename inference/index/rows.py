"""Rows that an index gets: records of its sources whose ids it lacks, and the comparison of ids and sequences.

Ids are compared by keys of 8 bytes in a file: the upper bits of an id's hash, and its row in the others. Ids with equal
upper bits are compared themselves, and so are the sequences of equal ids: their lengths and both of their hashes.

Shape legend: n rows of a block.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.arrays import scratch_array
from esmeray.dataset.embeddings.manifest import INDEX_ROWS, differ, ranges
from esmeray.dataset.embeddings.reader import Embeddings
from esmeray.dataset.fasta.records import hashes_of
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

    def identities(self) -> Iterator[tuple[list[str], NDArray[np.uint64]]]:
        """Their ids and sequences (n, 3), in blocks."""
        for start, stop, chosen in self.blocks(INDEX_ROWS):
            ids = self.source.column("id", start, stop).take(chosen).to_pylist()
            yield ids, self.source.identities_of(start, stop)[chosen]


def new_rows(sources: Sequence[Embeddings], index: Index | None, folder: Path) -> Iterator[NewRows]:
    """Records of each source whose ids the index and the sources before it lack; ``folder`` has room for the keys.

    Raises DataError for sources that the index can't be compared with, and for an id with another sequence than before,
    in its own source, too.
    """
    tables: list[Index | Embeddings] = [*sources]
    counts = [*map(len, sources)]
    if index is not None:
        for source in sources:
            source.refuse_other_space(index)
        tables.insert(0, index)
        counts.insert(0, index.count)
    # Rows of all are numbered through. The lower bits of a key are its row: rows in an array of their own could not be
    # sorted in place along with the hashes.
    firsts = np.cumsum([0, *counts])
    keys = scratch_array(folder, [sum(counts)], np.uint64)
    row_bits = np.uint64((1 << sum(counts).bit_length()) - 1)
    if index is not None:
        index.id_hashes(out=keys[: index.count])
        for start, stop in ranges(index.count, INDEX_ROWS):  # in blocks, for memory
            keys[start:stop] = _keys(keys[start:stop], start, row_bits)
    for number, source in enumerate(sources, len(tables) - len(sources)):
        first = int(firsts[number])
        for start, stop in ranges(len(source), INDEX_ROWS):
            keys[first + start : first + stop] = _keys(_hashes(source, start, stop), first + start, row_bits)
        sorted_keys = keys[: first + len(source)]
        sorted_keys.sort()
        records = scratch_array(folder, [len(source)], np.min_scalar_type(len(source)))
        new = 0
        for start, stop in ranges(len(source), INDEX_ROWS):
            chosen = start + np.flatnonzero(_are_new(tables, firsts, number, start, stop, sorted_keys, row_bits))
            records[new : new + len(chosen)] = chosen
            new += len(chosen)
        yield NewRows(source, records[:new])


def _are_new(
    tables: Sequence[Index | Embeddings],
    firsts: NDArray[np.int64],
    number: int,
    start: int,
    stop: int,
    keys: NDArray[np.uint64],
    row_bits: np.uint64,
) -> NDArray[np.bool_]:
    """(n,) whether no table before has the id, of the records of table ``number`` from ``start`` up to ``stop``."""
    ids_n, sequences_n3 = _at(tables[number], np.arange(start, stop))
    places_n = keys.searchsorted(hashes_of([name.encode() for name in ids_n]) & ~row_bits)
    is_new_n = np.ones(len(ids_n), dtype=bool)
    left = np.arange(len(ids_n))
    # Of keys with equal upper bits the earliest row comes first: a search ends at the same id, or at its own row.
    while left.size:
        rows = (keys[places_n[left]] & row_bits).astype(np.int64)
        is_before = rows < firsts[number] + start + left
        left = left[is_before]
        rows = rows[is_before]
        is_same = np.zeros(len(left), dtype=bool)
        owners = firsts.searchsorted(rows, side="right") - 1
        for owner in np.unique(owners).tolist():
            chosen = np.flatnonzero(owners == owner)
            ids, sequences = _at(tables[owner], rows[chosen] - firsts[owner])
            is_same[chosen] = ids == ids_n[left[chosen]]
            is_other = is_same[chosen] & differ(sequences, sequences_n3[left[chosen]])
            if is_other.any():
                raise DataError(
                    f"{tables[number].source}: {ids[is_other.argmax()]!r} is another sequence than in "
                    f"{tables[owner].source}; give it another id"
                )
        is_new_n[left[is_same]] = rows[is_same] >= firsts[number]
        left = left[~is_same]
        places_n[left] += 1
    return is_new_n


def _at(table: Index | Embeddings, rows_n: NDArray[np.int64]) -> tuple[NDArray, NDArray[np.uint64]]:
    """(n,) ids and (n, 3) sequences of rows."""
    if isinstance(table, Index):
        return np.array(table.ids(rows_n), dtype=object), table.sequences(rows_n)
    # Ascending, so that each block of a source is read once.
    records, order = np.unique(rows_n, return_inverse=True)
    ids, sequences = zip(*NewRows(table, records).identities(), strict=True)
    return np.concatenate([np.array(block, dtype=object) for block in ids])[order], np.concatenate(sequences)[order]


def _keys(hashes_n: NDArray[np.uint64], first: int, row_bits: np.uint64) -> NDArray[np.uint64]:
    return hashes_n & ~row_bits | np.arange(first, first + len(hashes_n), dtype=np.uint64)


def _hashes(source: Embeddings, start: int, stop: int) -> NDArray[np.uint64]:
    return hashes_of([name.encode() for name in source.column("id", start, stop).to_pylist()])
