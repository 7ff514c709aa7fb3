"""Select the source records whose ids an index lacks, by comparing ids and sequences.

Ids are compared by keys of 24 bytes in a temporary file: a cryptographic digest of the id, and its row. Sequences of
equal ids are compared by both hashes of their keys, 16 bytes in another file.

Shape legend: N rows of the index and its sources, n rows of a block.
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
    """Records of a source whose ids occur neither in the index nor in earlier sources."""

    source: Embeddings
    records: NDArray[np.integer]

    def blocks(self, size: int) -> Iterator[tuple[int, int, NDArray[np.integer]]]:
        """Yield start and stop of each source block with new records, and the records' offsets in the block."""
        for start, stop in ranges(len(self.source), size):
            chosen = self.records[slice(*self.records.searchsorted([start, stop]))]
            if len(chosen):  # otherwise nothing in the block is new, and it is not read
                yield start, stop, chosen - start

    def ids_and_keys(self) -> Iterator[tuple[list[str], NDArray[np.uint64]]]:
        """Yield ids and sequence keys (n, 2), in blocks."""
        for start, stop, chosen in self.blocks(INDEX_ROWS):
            ids = self.source.column("id", start, stop).take(chosen).to_pylist()
            yield ids, self.source.sequence_keys_of(start, stop)[chosen]


def new_rows(sources: Sequence[Embeddings], index: Index | None, folder: Path) -> Iterator[NewRows]:
    """Yield the records of each source whose ids the index and earlier sources lack.

    ``folder`` holds the temporary keys.

    Raises DataError for sources that can't be compared with the index, and for an id that occurs with different
    sequences, also within one source.
    """
    tables: list[Index | Embeddings] = [*sources] if index is None else [index, *sources]
    for source in sources:
        source.refuse_other_space(tables[0])
    # Rows of all tables are numbered consecutively.
    firsts = np.cumsum([0, *map(len, tables)]).tolist()
    keys = scratch_array(folder, [firsts[-1]], "S24")
    sequences_N2 = scratch_array(folder, [firsts[-1], 2], np.uint64)
    for first, table in zip(firsts, tables, strict=False):
        for start, ids, sequences_n2 in _blocks(table):
            rows = slice(first + start, first + start + len(ids))
            # The row comes last, so that among equal ids the earliest row sorts first.
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
                    f"{source.source}: {ids[other]!r} has a different sequence in {owner.source}; give it another id"
                )
            chosen = start + np.flatnonzero(earliest_n >= first)
            records[new : new + len(chosen)] = chosen
            new += len(chosen)
        yield NewRows(source, records[:new])


def _blocks(table: Index | Embeddings) -> Iterator[tuple[int, list[str], NDArray[np.uint64]]]:
    """Yield start, ids and sequence keys (n, 2) of each block of rows."""
    for start, stop in ranges(len(table), INDEX_ROWS):
        if isinstance(table, Index):
            yield start, table.ids(range(start, stop)), table.sequences(np.arange(start, stop))
        else:
            yield start, table.column("id", start, stop).to_pylist(), table.sequence_keys_of(start, stop)


def _digest(record_id: str) -> bytes:
    """BLAKE2b digest of 16 bytes. No BLAKE2b collision is known, while XXH3 collisions can be constructed."""
    return blake2b(record_id.encode(), digest_size=16).digest()
