"""The compiled part of conversion: parsing plain FASTA, hashing what was parsed, noticing ids that were there before.

In: text, and tables that NumPy holds. Out: columns of records. ``kernel.cpp`` is compiled once a machine
(:mod:`common.compiled_code`), in about a second. Without a compiler dnaio parses and Python's set holds the ids, at a
seventh of the speed.

Shape legend: N records or hashes, B buckets, S places of a bucket.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from xxhash import _xxhash  # type: ignore[attr-defined]

from common import compiled_code
from dataset.fasta.alphabet import FIRST, LAST, LEFT_OUT
from dataset.fasta.records import Lines, Records


class Columns:
    """Room for what the kernel writes: all that a text of some size can give."""

    def __init__(self, num_bytes: int) -> None:
        most_records = num_bytes // 2 + 1
        self.headers, self.ids, self.residues = (np.empty(num_bytes + 1, dtype=np.uint8) for _ in range(3))
        self.header_lengths, self.id_lengths, self.lengths = (np.empty(most_records, np.uint32) for _ in range(3))
        self.id_hashes, self.hashes = (np.empty(most_records, np.uint64) for _ in range(2))
        self.totals = np.empty(4, dtype=np.int64)
        arrays = (self.headers, self.ids, self.residues, self.header_lengths, self.id_lengths, self.lengths)
        self.addresses = [array.ctypes.data for array in (*arrays, self.id_hashes, self.hashes, self.totals)]

    def records(self, count: int) -> Records:
        """A copy of the first ``count`` records."""
        header_bytes, id_bytes, num_residues, all_stored = self.totals.tolist()
        return Records(
            headers=Lines(self.headers[:header_bytes].tobytes(), self.header_lengths[:count].copy()),
            ids=Lines(self.ids[:id_bytes].tobytes(), self.id_lengths[:count].copy()),
            residues=self.residues[:num_residues].tobytes(),
            lengths=self.lengths[:count].copy(),
            id_hashes=self.id_hashes[:count].copy(),
            hashes=self.hashes[:count].copy(),
            all_stored=bool(all_stored),
        )


class Kernel:
    """The functions of ``kernel.cpp``; they let go of Python's global lock.

    XXH3-64 is called where the xxhash package has it, so that there is one implementation of what stores hold.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Find the functions.

        Raises:
            AttributeError: the xxhash package was built without names that another library can call.
        """
        self._hash = ctypes.cast(ctypes.CDLL(_xxhash.__file__).XXH3_64bits, ctypes.c_void_p)
        self._parse = library.parse_plain_fasta
        self._parse.restype = ctypes.c_int64
        self._parse.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_void_p] * 9]

        self._insert = library.insert_hashes
        self._insert.restype = ctypes.c_int64
        self._insert.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]

    def parse(self, text: np.ndarray, columns: Columns) -> Records | None:
        """The records of a text that starts with '>' and ends with a line feed; None where it is not plain."""
        count = self._parse(text.ctypes.data, len(text), self._hash, *columns.addresses)
        return None if count < 0 else columns.records(count)

    def insert(self, table_BS: np.ndarray, hashes_N: np.ndarray) -> np.ndarray:
        """Put (N,) uint64 other than 0 into the table of a ``HashSet64``; (N,) bool: which are new."""
        hashes_N = np.ascontiguousarray(hashes_N)
        fresh_N = np.empty(len(hashes_N), dtype=bool)
        mask = len(table_BS) - 1
        self._insert(table_BS.ctypes.data, mask, hashes_N.ctypes.data, len(hashes_N), fresh_N.ctypes.data)
        return fresh_N


def load_kernel() -> Kernel | None:
    """The kernel, compiled if it was not yet; None where that can't be done."""
    source = Path(__file__).with_name("kernel.cpp")
    library = compiled_code.load(source, FIRST=FIRST, LAST=LAST, LEFT_OUT=LEFT_OUT)
    try:
        return None if library is None else Kernel(library)
    except (AttributeError, OSError):
        return None
