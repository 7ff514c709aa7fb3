"""An S3 server on 127.0.0.1 that fails when it is asked to."""

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
    """Follow these settings of the section storage until the test ends."""
    monkeypatch.setenv(remote.VARIABLE, "{}")
    monkeypatch.setattr(remote, "_storage", remote.storage())
    remote.use(remote.Storage(**settings))


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Nothing: a test's output is its own."""


class ObjectStore:
    """moto's S3.

    Attributes:
        fault: gives, for method and path of a request, a status to answer, 'half' for half of the object, or None.
        requests: counts of methods and paths.
        sent: bytes of the answers by path.
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
    """A server with a bucket ``bucket``, which this process and those that it starts use for s3://."""
    store = ObjectStore()
    variables = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # what is shown is that Esmeray tries again
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    s3 = fsspec.get_filesystem_class("s3")
    s3.clear_instance_cache()  # one that another test made without credentials keeps without them
    try:
        fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # moto keeps it as long as the process lives
        yield store
    finally:
        s3.clear_instance_cache()  # they know the address of the server
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
        store.close()
