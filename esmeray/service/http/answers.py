"""Answers with arrays: JSON, Arrow IPC stream, .npy, Parquet or CSV, as the header ``Accept`` requests.

A vector of 1,024 channels takes 16 kB as JSON and 4 kB as Arrow or .npy.
Shape legend: N sequences, L residues per sequence, D channels.
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
"""Numbers written as JSON at a time. That holds the GIL for about a millisecond."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="large")
"""One thread for all large requests. With more threads the event loop would wait for the GIL more often."""
_KINDS = dict.fromkeys(("", "*/*", "application/json", "application/*"), "") | {
    kind: kind for kind in (ARROW, NPY, PARQUET, CSV)
}
"""Kind of answer by media type of ``Accept``; '' is JSON."""


async def wanted(request: Request) -> str:
    """Return the first supported media type of ``Accept``; '' for JSON. Raises RefusalError (406) if there is none."""
    # In the order of the header. Weights (q=) are ignored: clients nearly always list types by weight.
    for accepted in request.headers.get("accept", "").split(","):
        kind = accepted.partition(";")[0].strip().lower()
        if kind in _KINDS:
            return _KINDS[kind]
    raise RefusalError(406, f"answers are application/json, {ARROW}, {NPY}, {PARQUET} or {CSV}")


async def off_loop(is_large: bool, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of ``work``. If ``is_large``, a thread computes it, so that the event loop stays free."""
    if is_large:
        return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)
    return work(*arguments)  # here, since the thread may be busy with large requests


def are_many(arrays: Arrays | list[list[int]]) -> bool:
    """Return whether an answer is large: built off the event loop and sent in pieces."""
    return sum(map(np.size, arrays)) > TOGETHER


def json_answer(content: Any) -> Response:
    """Return content with arrays at any depth as JSON. A large answer is sent while it is written.

    Lists may be generators; their items are then built in the thread that calls this function.
    """
    arrays: list[NDArray] = []
    # Arrays are written as marks first and replaced later. The mark is random, so that no id can contain it.
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
    # An async generator, since Starlette would run a plain one in any of forty threads.
    while piece := await off_loop(True, next, pieces, b""):
        yield piece


def _json_pieces(texts: list[bytes], arrays: list[NDArray]) -> Iterator[bytes]:
    """Yield the texts with an array between each two, in pieces of at least one block of numbers."""
    piece = texts[0]
    for values, text in zip(arrays, texts[1:], strict=True):
        for block in _json_blocks(values):
            piece += block
            if len(piece) > 10 * TOGETHER:  # otherwise each short array would wait for the thread
                yield piece
                piece = b""
        piece += text
    yield piece


def _json_blocks(values: NDArray) -> Iterator[bytes]:
    """Yield an array as JSON, some rows at a time."""
    for number, rows in enumerate(np.array_split(values, max(1, min(len(values), values.size // TOGETHER + 1)))):
        yield (b"," if number else b"[") + to_json(rows.tolist())[1:-1]  # without its own brackets
    yield b"]"


def arrays_answer(
    kind: str, ids: Sequence[str], arrays: Arrays, name: str, content: Any, channels: Sequence[str] = (), **columns: Any
) -> Response:
    """Return arrays as an answer of the requested kind.

    Args:
        kind: media type; '' for JSON.
        ids: first column of tables.
        arrays: (N, D), or one array (L, D) per id. In .npy the latter are concatenated to (sum of L, D).
        name: column of the arrays in tables.
        content: the whole answer as JSON.
        channels: names of the D numbers of a vector; tables then have a column for each.
        columns: further columns of tables.
    """
    if not kind:
        return json_answer(content)
    if kind == NPY:
        return _npy(arrays if isinstance(arrays, np.ndarray) else np.concatenate(arrays))
    if kind == CSV and not isinstance(arrays, np.ndarray):  # CSV has no lists
        raise RefusalError(406, f"CSV has one row per sequence; ask for {PARQUET}")
    if kind == CSV and not channels:
        channels = [f"{name}_{number}" for number in range(len(arrays[0]))]
    values = np.asarray(arrays).T if channels else [_column(arrays)]
    # A class may be called id, like a column of ours.
    taken = {head: f"{name}_{head}" for head in ("id", *columns)}
    heads = ["id", *columns, *(taken.get(channel, channel) for channel in channels or [name])]
    return table_answer(kind, pa.table([*map(pa.array, (ids, *columns.values(), *values))], names=heads))


def table_answer(kind: str, table: pa.Table) -> Response:
    """Return the table as Arrow IPC stream, Parquet or CSV; .npy holds its last column."""
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
    np.save(buffer, array, allow_pickle=False)  # an array of objects would be a bug here
    return Response(buffer.getvalue(), media_type=NPY)


def _column(arrays: Arrays) -> pa.Array:
    """Return a fixed-size list per vector, or a list of L such lists per (L, D)."""
    rows = arrays if isinstance(arrays, np.ndarray) else np.concatenate(arrays)
    # From one flat buffer: pa.array of a list of rows would build a Python object per number.
    flat = pa.array(np.ascontiguousarray(rows, dtype=np.float32).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, rows.shape[-1])
    return (
        vectors
        if isinstance(arrays, np.ndarray)
        else pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, arrays)], dtype=np.int32)), vectors)
    )
