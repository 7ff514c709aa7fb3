"""An S3 server on 127.0.0.1 with injected faults."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from esmeray.common import remote

Answer = Iterable[bytes]


def use_storage(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Use these settings of the section ``storage`` until the test ends."""
    monkeypatch.setenv(remote.VARIABLE, "{}")
    remote.use(remote.Storage(**settings))


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Log nothing, as tests capture the output."""


class ObjectStore:
    """moto's S3 server with faults and counters.

    Attributes:
        fault: function of a request's method and path that returns an HTTP status to answer with, 'half' to send half
            of the object, or None.
        requests: number of requests by method and path.
        sent: number of bytes sent by path.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self.requests: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[str] = Counter()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Answer:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests[method, path] += 1
        fault = self.fault(method, path)
        if fault is None:
            answer = [*self._app(environ, start)]
            self.sent[path] += sum(map(len, answer))
            return answer
        if isinstance(fault, int):
            start(f"{fault} Service Unavailable", [("Content-Length", "0")])
            return [b""]
        answered: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers, *_: answered.extend((status, headers))))
        body = body[: len(body) // 2]
        status, headers = answered
        kept = [(n, v) for n, v in headers if n.lower() != "content-length" and not n.lower().startswith("x-amz-check")]
        start(status, [*kept, ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with a bucket ``bucket`` that this process and its child processes use for s3://."""
    store = ObjectStore()
    variables = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # the tests are about Esmeray's own retries
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    s3 = fsspec.get_filesystem_class("s3")
    s3.clear_instance_cache()  # a client that another test created has no credentials
    try:
        fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # moto keeps buckets as long as the process lives
        yield store
    finally:
        s3.clear_instance_cache()  # clients keep the address of the server
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
        store.close()
