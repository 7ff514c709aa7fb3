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
from esmeray.inference.index.parts import Identities


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

    def identities(self) -> Iterator[Identities]:
        """Their ids and sequences, in blocks."""
        trained_N = self.source.trained
        for start, stop, chosen in self.blocks(INDEX_ROWS):
            ids = self.source.column("id", start, stop).take(chosen).to_pylist()
            trained_n = None if trained_N is None else trained_N[start + chosen]
            yield Identities(ids, self.source.identities_of(start, stop)[chosen], trained_n)


class Rows:
    """Rows of an index, then of its sources, numbered through.

    ``unchecked``: records of ids that are there, for which an index of an earlier version does not have the sequence.
    """

    def __init__(self, sources: Sequence[Embeddings], index: Index | None, folder: Path) -> None:
        """``folder`` has room for the keys. Raises DataError for sources that the index can't be compared with."""
        for source in sources if index is not None else []:
            source.refuse_other_space(index)
        self.unchecked = 0
        self._index = index
        self._sources = sources
        self._folder = folder
        self._firsts = np.cumsum([0 if index is None else index.count, *map(len, sources)])
        total = int(self._firsts[-1])
        # The lower bits of a key are its row. A second array for rows could not be sorted in place along with the keys.
        self._row_bits = np.uint64((1 << total.bit_length()) - 1)
        self._keys = scratch_array(folder, [total], np.uint64)
        if index is not None:
            self._add(0, index.id_hashes(out=self._keys[: index.count]))

    def new_rows(self, number: int) -> NewRows:
        """Records of a source whose ids the index and the sources before lack. Call it once per source, in order.

        Raises DataError if an id has another sequence than before, in this source or in another.
        """
        source = self._sources[number]
        first = int(self._firsts[number])
        for start, stop in ranges(len(source), INDEX_ROWS):
            self._add(first + start, _hashes(_ids(source, start, stop)))
        keys = self._keys[: first + len(source)]
        keys.sort()
        records = scratch_array(self._folder, [len(source)], np.min_scalar_type(len(source)))
        new = 0
        for start, stop in ranges(len(source), INDEX_ROWS):
            chosen = start + np.flatnonzero(~self._are_known(keys, number, start, stop))
            records[new : new + len(chosen)] = chosen
            new += len(chosen)
        return NewRows(source, records[:new])

    def _add(self, first: int, hashes_n: NDArray[np.uint64]) -> None:
        rows_n = np.arange(first, first + len(hashes_n), dtype=np.uint64)
        self._keys[first : first + len(hashes_n)] = (hashes_n & ~self._row_bits) | rows_n

    def _are_known(self, keys: NDArray[np.uint64], number: int, start: int, stop: int) -> NDArray[np.bool_]:
        """(n,) whether the id of each record from ``start`` up to ``stop`` is there before its source."""
        first = int(self._firsts[number])
        ids = np.array(_ids(self._sources[number], start, stop), dtype=object)
        places_n = keys.searchsorted(_hashes(ids) & ~self._row_bits)
        known_n = np.zeros(len(ids), dtype=bool)
        left = np.arange(len(ids))
        # Of keys with equal upper bits the earliest row comes first: a search ends at the same id, or at its own row.
        while left.size:
            rows = (keys[places_n[left]] & self._row_bits).astype(np.int64)
            is_before = rows < first + start + left
            left = left[is_before]
            rows = rows[is_before]
            there, sequences_n3 = self._at(rows)
            is_same = there == ids[left]
            known_n[left[is_same]] = rows[is_same] < first
            self._check(number, start + left[is_same], rows[is_same], sequences_n3[is_same])
            left = left[~is_same]
            places_n[left] += 1
        return known_n

    def _check(
        self, number: int, records_n: NDArray[np.int64], rows_n: NDArray[np.int64], sequences_n3: NDArray[np.uint64]
    ) -> None:
        """Raise DataError if a record of a source has another sequence than the row with its id."""
        if not records_n.size:
            return
        source = self._sources[number]
        start = int(records_n[0])
        is_other_n = differ(source.identities_of(start, int(records_n[-1]) + 1)[records_n - start], sequences_n3)
        if is_other_n.any():
            index = int(is_other_n.argmax())
            owner = int(self._firsts.searchsorted(rows_n[index], side="right")) - 1
            where = self._sources[owner].source if owner >= 0 or self._index is None else self._index.source
            (name,) = _ids(source, int(records_n[index]), int(records_n[index]) + 1)
            raise DataError(f"{source.source}: {name!r} is another sequence than in {where}; give it another id")
        self.unchecked += int(np.count_nonzero(sequences_n3[:, 0] == 0))

    def _at(self, rows_n: NDArray[np.int64]) -> tuple[NDArray, NDArray[np.uint64]]:
        """(n,) ids and (n, 3) sequences of rows."""
        ids_n = np.empty(len(rows_n), dtype=object)
        sequences_n3 = np.zeros((len(rows_n), 3), np.uint64)
        owners_n = self._firsts.searchsorted(rows_n, side="right") - 1
        for owner in np.unique(owners_n).tolist():
            chosen = np.flatnonzero(owners_n == owner)
            if owner < 0 and self._index is not None:
                ids_n[chosen] = self._index.ids(rows_n[chosen])
                sequences_n3[chosen] = self._index.sequences(rows_n[chosen])
                continue
            # Ascending, so that each block of the source is read once.
            records, order = np.unique(rows_n[chosen] - self._firsts[owner], return_inverse=True)
            blocks = [*NewRows(self._sources[owner], records).identities()]
            ids_n[chosen] = np.concatenate([np.array(block.ids, dtype=object) for block in blocks])[order]
            sequences_n3[chosen] = np.concatenate([block.sequences for block in blocks])[order]
        return ids_n, sequences_n3


def _ids(source: Embeddings, start: int, stop: int) -> list[str]:
    ids: list[str] = source.column("id", start, stop).to_pylist()
    return ids


def _hashes(ids: Sequence[str]) -> NDArray[np.uint64]:
    return hashes_of([name.encode() for name in ids])
