"""Answers with arrays: JSON, Arrow IPC stream, .npy, Parquet or CSV, as ``Accept`` asks. As JSON a vector of 1,024
channels takes 16 kB, as Arrow or .npy 4. Shape legend: N sequences, L residues of one, D channels.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from numpy.typing import NDArray
from pydantic_core import to_json

from esmeray.service.http.refusals import RefusalError

Arrays = NDArray | Sequence[NDArray]
Result = TypeVar("Result")
ARROW, NPY, PARQUET, CSV = (
    "application/vnd.apache.arrow.stream",
    "application/x-npy",
    "application/vnd.apache.parquet",
    "text/csv",
)
TOGETHER = 10_000
"""Numbers that are written as JSON at a time, in a millisecond for which the GIL is held."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="large")
"""For all requests, which take turns: the event loop would be one of many that wait for the GIL otherwise."""
GIVEN = dict.fromkeys(("", "*/*", "application/json", "application/*"), "") | {
    kind: kind for kind in (ARROW, NPY, PARQUET, CSV)
}
"""The kind of answer for each type that ``Accept`` may name; '' is JSON."""


async def wanted(request: Request) -> str:
    """The first type of ``Accept`` that can be given; '' for JSON. Raises RefusalError (406) where there is none."""
    # In the order of the header: weights (q=) are left out, which clients seldom send in another order.
    for accepted in request.headers.get("accept", "").split(","):
        kind = accepted.partition(";")[0].strip().lower()
        if kind in GIVEN:
            return GIVEN[kind]
    raise RefusalError(406, f"answers are application/json, {ARROW}, {NPY}, {PARQUET} or {CSV}")


async def off_loop(is_large: bool, work: Callable[..., Result], *arguments: Any) -> Result:
    """The result of ``work`` for a request; of a large one it is computed by a thread, next to the event loop."""
    if is_large:
        return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)
    return work(*arguments)  # at once: the thread may have large ones to do


def are_many(arrays: Arrays | list[list[int]]) -> bool:
    """Test for a large answer, which is built off the event loop and sent in pieces."""
    return sum(map(np.size, arrays)) > TOGETHER


def json_answer(content: Any) -> Response:
    """JSON of what has arrays at any depth; a large one is sent while it is written, never whole.

    Lists may be generators, whose items are then made where this is called, and not before.
    """
    arrays: list[NDArray] = []
    # The rest is written around marks, in which arrays are put later; random, so that no sequence's id can be one.
    mark = uuid4().hex

    def marked(values: NDArray) -> str:
        arrays.append(values)
        return mark

    pieces = _json_pieces(to_json(content, fallback=marked).split(f'"{mark}"'.encode()), arrays)
    return (
        StreamingResponse(_written(pieces), media_type="application/json")
        if are_many(arrays)
        else Response(b"".join(pieces), media_type="application/json")
    )


async def _written(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    # Starlette would run the generator in one of forty threads.
    while piece := await off_loop(True, next, pieces, b""):
        yield piece


def _json_pieces(texts: list[bytes], arrays: list[NDArray]) -> Iterator[bytes]:
    """The texts with an array between each two, a block of numbers or more at a time."""
    piece = texts[0]
    for values, text in zip(arrays, texts[1:], strict=True):
        for block in _json_blocks(values):
            piece += block
            if len(piece) > 10 * TOGETHER:  # each of many short arrays would wait for the thread otherwise
                yield piece
                piece = b""
        piece += text
    yield piece


def _json_blocks(values: NDArray) -> Iterator[bytes]:
    """JSON of an array, some of its rows at a time."""
    for number, rows in enumerate(np.array_split(values, max(1, min(len(values), values.size // TOGETHER + 1)))):
        yield (b"," if number else b"[") + to_json(rows.tolist())[1:-1]  # its own brackets cut off
    yield b"]"


def arrays_answer(
    kind: str, ids: Sequence[str], arrays: Arrays, name: str, content: Any, channels: Sequence[str] = (), **columns: Any
) -> Response:
    """The arrays of ids in the kind that is wanted; ``content`` is all of it for JSON. Tables have further ``columns``,
    and one for each of the ``channels``, the names of the numbers of a vector.

    .npy is (N, D); of several arrays of different lengths it is their rows end to end, (sum of L, D).
    """
    if not kind:
        return json_answer(content)
    if kind == NPY:
        return _npy(arrays if isinstance(arrays, np.ndarray) else np.concatenate(arrays))
    if kind == CSV and not isinstance(arrays, np.ndarray):  # CSV has no lists
        raise RefusalError(406, f"CSV has one row a sequence; ask for {PARQUET}")
    if kind == CSV and not channels:
        channels = [f"{name}_{number}" for number in range(len(arrays[0]))]
    values = np.asarray(arrays).T if channels else [_column(arrays)]
    # A class may be called id.
    taken = {head: f"{name}_{head}" for head in ("id", *columns)}
    heads = ["id", *columns, *(taken.get(channel, channel) for channel in channels or [name])]
    return table_answer(kind, pa.table([*map(pa.array, (ids, *columns.values(), *values))], names=heads))


def table_answer(kind: str, table: pa.Table) -> Response:
    """The table as Arrow IPC stream, Parquet or CSV; .npy holds its last column."""
    if kind == NPY:
        return _npy(table.column(table.num_columns - 1).to_numpy())
    buffer = io.BytesIO()
    if kind == ARROW:
        with pa.ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table)
    elif kind == PARQUET:
        pq.write_table(table, buffer)
    else:
        pacsv.write_csv(table, buffer)
    return Response(buffer.getvalue(), media_type=kind)


def _npy(array: NDArray) -> Response:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)  # an array of objects is a fault here, not something to send
    return Response(buffer.getvalue(), media_type=NPY)


def _column(arrays: Arrays) -> pa.Array:
    """A list of fixed size for each vector; for each (L, D) a list of L of them."""
    rows = arrays if isinstance(arrays, np.ndarray) else np.concatenate(arrays)
    # From one flat buffer: pa.array of a list of rows would build an object for each number.
    flat = pa.array(np.ascontiguousarray(rows, dtype=np.float32).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, rows.shape[-1])
    return (
        vectors
        if isinstance(arrays, np.ndarray)
        else pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, arrays)], dtype=np.int32)), vectors)
    )
