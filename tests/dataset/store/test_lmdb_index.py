"""What is found in the pages of an LMDB file is what LMDB itself finds."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.store.format import LMDB_MAJOR, find_index_pages, key_bytes
from dataset.store.lmdb_index import find_values

SIZES = st.one_of(st.integers(0, 40), st.integers(1900, 2100), st.integers(4000, 30_000))


def write(folder: Path, transactions: list[list[bytes]]) -> int:
    """An LMDB with the values of each transaction under ascending keys; returns its page size."""
    with lmdb.open(str(folder), map_size=1 << 26, lock=False, lib_version=LMDB_MAJOR) as environment:
        number = 0
        for values in transactions:
            with environment.begin(write=True) as transaction:
                for value in values:
                    transaction.put(key_bytes(number), value, append=True)
                    number += 1
        return environment.stat()["psize"]


def found(folder: Path, page_bytes: int) -> list[bytes]:
    """The values by key, as the index says where they lie."""
    path = folder / "data.mdb"
    data = memoryview(path.read_bytes())
    extents = find_values(data, page_bytes, find_index_pages(path, page_bytes))
    return [bytes(data[at : at + size]) for _, (at, size) in sorted(extents.items())]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.lists(SIZES, max_size=40), min_size=1, max_size=6).filter(any), seed=st.integers(0, 9))
def test_every_value_is_found_whatever_its_size_and_transaction(tmp_path_factory, sizes, seed):
    folder = tmp_path_factory.mktemp("lmdb")
    transactions = [[random.Random(seed).randbytes(size) for size in part] for part in sizes]
    page_bytes = write(folder, transactions)
    assert found(folder, page_bytes) == [value for values in transactions for value in values]


def test_a_tree_of_several_levels_is_followed(tmp_path):
    values = [b"%d" % number * 3 for number in range(20_000)]
    page_bytes = write(tmp_path, [values[:5_000], values[5_000:]])
    assert found(tmp_path, page_bytes) == values


def test_no_byte_of_a_value_is_looked_at(tmp_path):
    page_bytes = write(tmp_path, [[b"x" * 50_000, b"y" * 9_000]])
    path = tmp_path / "data.mdb"
    pages = find_index_pages(path, page_bytes)
    data = bytearray(path.read_bytes())
    before = find_values(memoryview(bytes(data)), page_bytes, pages)
    for page in set(range(len(data) // page_bytes)) - set(pages):
        data[page * page_bytes : (page + 1) * page_bytes] = b"?" * page_bytes
    assert find_values(memoryview(data), page_bytes, pages) == before


def test_a_page_that_was_not_checked_is_not_followed(tmp_path):
    page_bytes = write(tmp_path, [[b"x" * 50_000]])
    data = memoryview((tmp_path / "data.mdb").read_bytes())
    with pytest.raises(ValueError, match="outside itself"):
        find_values(data, page_bytes, [0, 1])


def test_a_value_beyond_the_end_is_refused(tmp_path):
    page_bytes = write(tmp_path, [[b"x" * 50_000]])
    pages = find_index_pages(tmp_path / "data.mdb", page_bytes)
    data = memoryview((tmp_path / "data.mdb").read_bytes())[: (max(pages) + 1) * page_bytes]
    with pytest.raises(ValueError, match="outside the file"):
        find_values(data, page_bytes, pages)
