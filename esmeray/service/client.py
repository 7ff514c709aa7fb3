"""Client of the service: arrays of any number of sequences, with a few concurrent requests and retries.

In: sequences. Out: their arrays, in the same order. Requests have a bounded size. A request that is refused with 429 or
503, or lost with a process or a connection, is sent again after the time in Retry-After. No message contains the key.
The client needs neither torch nor Ray.

    client = Client("http://127.0.0.1:8000")
    vectors = client.embed(["MKTAYIAKQR", "MSILVTRPSP"])          # (2, D)
    for name, residues in client.stream(records, output="residues"):  # (L, D) each
        ...
"""

import asyncio
import io
import os
import random
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from esmeray.common.errors import (
    FORKED,
    ConfigError,
    DataError,
    EsmerayError,
    ForkedError,
    ResourceError,
    naming_variables,
)
from esmeray.dataset.sequence_list import checked_list, checked_text, checked_texts
from esmeray.service.contract import LIKELIHOOD
from esmeray.service.section import is_loopback
from esmeray.train_config.section import Section

ARROW = "application/vnd.apache.arrow.stream"
REQUEST_RESIDUES = 20_000
"""Maximum residues of a request; a longer sequence is sent alone."""
REQUEST_SEQUENCES = 256
REQUEST_NEIGHBOURS = 20_000
CONNECT_RETRIES = 5
"""Retries if nothing listens, or a proxy knows no service. They take eight seconds."""
_AGAIN = (429, 503)
_LOST = "Internal Server Error"
"""Ray Serve's own answer with 500, if a machine was lost with the process that handled the request."""
_FIRST_WAIT_S, _MAX_WAIT_S = 0.25, 30.0

GivenSequence = str | tuple[str, str]
"""Sequence, or pair of id and sequence."""


def checked_key(key: str, source: str) -> str:
    """Return the key. Raises ConfigError if it can't be a key; the message names its ``source`` without the key.

    httpx would refuse such a header too, but its message contains the whole header.
    """
    if not isinstance(key, str) or not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"{source}: holds no API key; a key is one word of printable ASCII, as 'esmeray serve key' prints it"
        )
    return key


class _Numbers(Section):
    """Validated numbers among the arguments: with concurrency 0 or negative retries, a client would never end."""

    concurrency: PositiveInt = 8
    retries: NonNegativeInt = 10
    timeout_s: PositiveFloat = 300.0
    top_k: PositiveInt = 10


class Client:
    """Client of a service. Its event loop runs in a thread, so that it also works in a notebook, whose loop is running.

    Args:
        address: address of the service.
        key: API key, if the service requires one.
        model: name of the model; None for the service's first.
        concurrency: maximum number of requests at once.
        retries: number of times that a request is sent again.
        timeout_s: timeout of a request, in seconds.

    The service cleans sequences as the commands do. Raises ConfigError for an invalid address or key, or for a single
    str in place of a list; DataError for a refused request.

    >>> with esmeray.Client(address) as client:
    ...     client.embed(["MKTAYIAKQR", "MSILVTRPSP"]).shape[0]
    2
    """

    def __init__(
        self,
        address: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        model: str | None = None,
        concurrency: int = 8,
        retries: int = 10,
        timeout_s: float = 300.0,
    ) -> None:
        try:
            url = httpx.URL(address)
        except (httpx.InvalidURL, TypeError):
            url = httpx.URL("")
        # httpx escapes invalid characters of a host, and would then look for a machine of that name.
        if url.scheme not in ("http", "https") or not url.host or "%" in url.host:
            raise ConfigError(f"{address}: is not the address of a service; write it as http://HOST:PORT")
        _Numbers.of(concurrency=concurrency, retries=retries, timeout_s=timeout_s)
        # No proxy for this machine: the proxy may be another machine, whose loopback address is its own.
        is_here = is_loopback(url.host)
        with naming_variables():
            self._http = httpx.AsyncClient(
                base_url=address,
                headers={} if key is None else {"Authorization": f"Bearer {checked_key(key, 'key')}"},
                timeout=timeout_s,
                limits=httpx.Limits(max_connections=concurrency),
                trust_env=not is_here,
                # Without trust_env httpx would also ignore SSL_CERT_FILE, which may name the service's certificate.
                verify=httpx.create_ssl_context() if is_here and url.scheme == "https" else True,
            )
        self._process = os.getpid()
        self._model = model
        self._concurrency = concurrency
        self._retries = retries
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
        self._thread.start()

    def embed(self, sequences: Iterable[GivenSequence], output: str = "mean") -> NDArray | list[NDArray]:
        """Return (N, D), or a list of (L, D) for an output per residue."""
        arrays = [array for _, array in self.stream(sequences, output)]
        # Sequences differ in length, so outputs per residue stay a list.
        return np.stack(arrays) if arrays and arrays[0].ndim == 1 else arrays

    def classify(
        self, sequences: Iterable[GivenSequence], *, coverage: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield id, label, probabilities and the labels of the probabilities, in order; see ``/v1/classify``.

        With a ``coverage``, the conformal set or the ends of the interval are added.
        """
        fields = {} if coverage is None else {"coverage": coverage}
        answers = self._answers(
            _requests(checked_list(sequences, "sequences")), "/v1/classify", fields, "application/json"
        )
        contents = map(httpx.Response.json, answers)
        return ({**row, "labels": content["labels"]} for content in contents for row in content["data"])

    def search(
        self,
        sequences: Iterable[GivenSequence] | None = None,
        *,
        ids: Sequence[str] = (),
        index: str | None = None,
        top_k: int = 10,
    ) -> Iterator[dict[str, Any]]:
        """Yield id and neighbours (rank, id, score) of each query, in order; see ``/v1/search``.

        Args:
            sequences: queries.
            ids: in place of sequences, ids of proteins in the index.
            index: name of the index; None for the first.
            top_k: maximum number of neighbours of each query.
        """
        fields = {"index": index, "top_k": top_k}
        most = max(1, min(REQUEST_SEQUENCES, REQUEST_NEIGHBOURS // _Numbers.of(top_k=top_k).top_k))
        if sequences is None:
            names = checked_texts(ids, "ids")
            requests: Iterator[dict[str, Any]] = ({"ids": names[at : at + most]} for at in range(0, len(names), most))
        else:
            requests = _requests(checked_list(sequences, "sequences"), most)
        answers = self._answers(requests, "/v1/search", fields, "application/json")
        return (row for answer in answers for row in answer.json()["data"])

    def models(self) -> list[dict[str, Any]]:
        return self._sent("GET", "/v1/models").result().json()["data"]

    def stream(self, sequences: Iterable[GivenSequence], output: str = "mean") -> Iterator[tuple[str, NDArray]]:
        """Yield id and array of each sequence, in order. Without an id, its number is the id.

        Raises DataError for a refused request, ResourceError if the service can't be reached.
        """
        # Arrow takes a quarter of the bytes of JSON, and needs no parsing.
        requests = _requests(checked_list(sequences, "sequences"), masked=output == LIKELIHOOD)
        answers = self._answers(requests, "/v1/encode", {"output": output}, ARROW)
        tables = (pa.ipc.open_stream(io.BytesIO(answer.content)).read_all() for answer in answers)
        return (
            pair for table in tables for pair in zip(table["id"].to_pylist(), _arrays(table["embedding"]), strict=True)
        )

    def close(self) -> None:
        # Nothing to do the second time, or in a forked process, which has no thread of the event loop.
        if self._loop.is_closed() or self._process != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        # Before closing the connections, since a stream that was left early still has requests on them.
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._http.aclose()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(
        self, requests: Iterable[dict[str, Any]], path: str, fields: dict[str, Any], accept: str
    ) -> Iterator[httpx.Response]:
        """Yield the answers in order, while later requests are under way."""
        waiting: deque[Future[httpx.Response]] = deque()
        try:
            for asked in requests:
                body = {**asked, "model": self._model, **fields}
                waiting.append(self._sent("POST", path, json=body, headers={"Accept": accept}))
                # Oldest first: answers stay in order, and at most ``concurrency`` of them are in memory.
                if len(waiting) >= self._concurrency:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # also if the caller left the stream early, and the later answers have no reader
            for request in waiting:
                request.cancel()

    def _sent(self, method: str, path: str, **request: Any) -> Future[httpx.Response]:
        # A forked process has no thread of the event loop, and would wait for it forever.
        if self._process != os.getpid():
            raise ForkedError(f"{self._http.base_url}: {FORKED}")
        if self._loop.is_closed():
            raise ConfigError(f"{self._http.base_url}: this client is closed; create a new one")
        return asyncio.run_coroutine_threadsafe(self._send(method, path, **request), self._loop)

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        tries = 0
        wait_s = _FIRST_WAIT_S
        refusal: EsmerayError
        while True:
            retry_after_s = 0.0
            try:
                answer = await self._http.request(method, path, **request)
            except UnicodeEncodeError as error:  # a lone surrogate, e.g. from a file name that is not UTF-8
                raise DataError(f"{path}: text that is not valid UTF-8 can't be sent ({error.reason})") from None
            except httpx.TransportError as error:
                refusal = ResourceError(f"{self._http.base_url}: no answer ({error}); is the service running?")
                # If a connection broke later, there was a service, whose process may be replaced.
                is_there = not isinstance(error, httpx.ConnectError)
            else:
                if answer.is_success:
                    return answer
                refusal = DataError(f"{path}: refused with {answer.status_code}: {_detail(answer)}")
                # Ray Serve's or another proxy answers 404 before the service has started or after it has ended. The
                # service's own 404, e.g. for an unknown model, is final and has another type.
                kind = answer.headers.get("Content-Type", "")
                is_there = answer.status_code != 404 or kind.startswith("application/problem+json")
                is_lost = answer.status_code == 500 and answer.text == _LOST
                if is_there and not is_lost and answer.status_code not in _AGAIN:
                    raise refusal
                retry_after = answer.headers.get("Retry-After", "")
                retry_after_s = float(retry_after) if retry_after.isdigit() else 0.0  # a date is ignored
            # A service that starts or ends is away for some seconds. Without one, CONNECT_RETRIES are enough.
            if tries == self._retries or (not is_there and tries >= CONNECT_RETRIES):
                raise refusal
            # Add random time: otherwise clients that were refused together would come back together.
            await asyncio.sleep(max(retry_after_s, wait_s) * random.uniform(1.0, 1.3))
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
            tries += 1


def _requests(
    sequences: Iterable[GivenSequence], most: int = REQUEST_SEQUENCES, *, masked: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield requests of bounded size. Raises DataError at a wrong sequence.

    ``masked``: each residue is masked in turn, for which the service's limit is ten times as many residues.
    """
    records: list[dict[str, str]] = []
    residues = 0
    for number, record in enumerate(sequences):
        pair = record if isinstance(record, tuple) and len(record) == 2 else (str(number), record)
        name, sequence = (checked_text(value, f"sequences[{number}]") for value in pair)
        size = len(sequence) ** 2 // 10 if masked else len(sequence)
        # Both are below the service's default limits, beyond which it refuses a request with 413.
        if records and (residues + size > REQUEST_RESIDUES or len(records) == most):
            yield {"sequences": records}
            records, residues = [], 0
        records.append({"id": name, "sequence": sequence})
        residues += size
    if records:
        yield {"sequences": records}


def _arrays(column: pa.ChunkedArray) -> Sequence[NDArray]:
    """Return the arrays of a column, (D,) or (L, D) each."""
    values = column.combine_chunks()
    is_vectors = pa.types.is_fixed_size_list(values.type)
    # All rows, concatenated. If each array has several rows, the offsets are their boundaries.
    rows = values if is_vectors else values.flatten()
    array = rows.flatten().to_numpy().reshape(len(rows), -1)
    return list(array) if is_vectors else np.split(array, values.offsets.to_numpy()[1:-1])


def _detail(answer: httpx.Response) -> str:
    try:
        detail = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):  # from a proxy, whose answers have another format
        detail = answer.text[:200]
    remedy = "; --query.key_file or ESMERAY_KEY gives it, in Python Client(key=...)"
    return detail + remedy if answer.status_code == 401 else detail
