"""Where each value of an LMDB file lies, from the pages of its B-tree alone.

py-lmdb 3.0 can't say where a value lies without reading all of it: it touches the value's pages before it takes
Python's lock again, so that asking it of every block read the whole store (3.7 GB for 10 million records). The pages
that lead to the values are few, and a store's manifest lists them with their checksum.

Layouts are those of LMDB 0.9 on a 64-bit machine (mdb.c: MDB_page, MDB_meta, MDB_db, MDB_node), little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeAlias

Data: TypeAlias = memoryview

PAGE_HEADER = struct.Struct("<QHHI")
"""Page number, padding, flags, and where free space starts and ends (or how many pages a large value takes)."""

BRANCH_PAGE, OVERFLOW_PAGE = 0x01, 0x04
"""Flags: a page of the tree above the leaves, and the first page of a value too large for a leaf."""

_META_PAGES = 2
_ROOT_AT, _TRANSACTION_AT = 128, 144
_NUMBER = struct.Struct("<Q")
_NODE_HEADER = struct.Struct("<HHHH")
_LARGE_VALUE = 0x01
"""Flag of a node whose data is the number of the first page of the value."""


class Node(NamedTuple):
    """An entry of a page: its 16-bit fields and where key and data begin."""

    low: int
    high: int
    flags: int
    key: bytes
    data_at: int


def find_values(data: Data, page_bytes: int, index_pages: Collection[int]) -> dict[bytes, tuple[int, int]]:
    """Offset and size in bytes of every value, by key.

    Args:
        data: the file.
        page_bytes: LMDB's page size.
        index_pages: the pages that may be followed, since they were checked; no other is looked at.

    Raises:
        ValueError: a page or a value lies elsewhere.
    """
    known = set(index_pages)
    extents = {}
    waiting = [_root(data, page_bytes)]
    while waiting:
        page = waiting.pop()
        if page not in known:
            raise ValueError("its index points outside itself")
        known.remove(page)  # a tree has one way to each page
        flags = PAGE_HEADER.unpack_from(data, page * page_bytes)[2]
        for node in _nodes(data, page * page_bytes):
            if flags & BRANCH_PAGE:
                waiting.append(node.low | node.high << 16 | node.flags << 32)
            else:
                extents[node.key] = (_value_at(data, node, page_bytes), node.low | node.high << 16)
    if any(offset + num_bytes > len(data) for offset, num_bytes in extents.values()):
        raise ValueError("its index points outside the file")
    return extents


def _root(data: Data, page_bytes: int) -> int:
    """The page where the tree of the last transaction starts; the two meta pages are written in turns."""
    metas = range(0, _META_PAGES * page_bytes, page_bytes)
    newest = max(metas, key=lambda start: _NUMBER.unpack_from(data, start + _TRANSACTION_AT)[0])
    return _NUMBER.unpack_from(data, newest + _ROOT_AT)[0]


def _nodes(data: Data, page_start: int) -> Iterator[Node]:
    free_space_at = PAGE_HEADER.unpack_from(data, page_start)[3] & 0xFFFF
    offsets = data[page_start + PAGE_HEADER.size : page_start + free_space_at]
    for (offset,) in struct.iter_unpack("<H", offsets):
        low, high, flags, key_size = _NODE_HEADER.unpack_from(data, page_start + offset)
        key_at = page_start + offset + _NODE_HEADER.size
        yield Node(low, high, flags, bytes(data[key_at : key_at + key_size]), key_at + key_size)


def _value_at(data: Data, node: Node, page_bytes: int) -> int:
    if not node.flags & _LARGE_VALUE:
        return node.data_at
    return _NUMBER.unpack_from(data, node.data_at)[0] * page_bytes + PAGE_HEADER.size
