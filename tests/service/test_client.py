"""The client keeps the order, retries requests refused for overload, and reports errors with their reason."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import certifi
import huggingface_hub
import numpy as np
import pytest

from esmeray.common.errors import ConfigError, DataError, EsmerayError, ForkedError, ResourceError
from esmeray.dataset.tokens.model_folder import model_folder
from esmeray.service import client as module
from esmeray.service.client import Client
from tests.model.support import random_sequences
from tests.service.serving import Serving


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_SEQUENCES", 3)
    monkeypatch.setattr(module, "REQUEST_RESIDUES", 100)
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.01)


def test_order_is_kept_over_many_requests_at_once(address: str):
    sequences = random_sequences([1 + 7 * number % 60 for number in range(20)])
    with Client(address, concurrency=5) as client:
        vectors = client.embed(sequences)
        alone = [client.embed([sequence])[0] for sequence in sequences[::7]]
        rows = client.embed(sequences, "residues")
        with pytest.raises(DataError, match="/v1/classify: refused with 422: model esm has no classes"):
            next(client.classify(sequences[:7]))
        assert [model["id"] for model in client.models()] == ["esm", "autoencoder", "places", "helices", "folds"]
        assert client.embed([]) == []
    with Client(address, model="none") as client, pytest.raises(DataError, match="refused with 404: no such model"):
        client.embed(["MKT"])  # a 404 of the service is not retried
    assert isinstance(vectors, np.ndarray) and vectors.shape == (20, 32)
    np.testing.assert_allclose(vectors[::7], alone, rtol=1e-5, atol=1e-5)
    assert [len(of_one) for of_one in rows] == list(map(len, sequences))
    np.testing.assert_allclose([of_one.mean(0) for of_one in rows], vectors, rtol=1e-4, atol=1e-5)


def test_sequences_are_cleaned_and_refused_as_commands_do_it(address: str):
    with Client(address) as client:
        expected = client.embed(["MKTAYIAKQR", "MXK"])
        np.testing.assert_array_equal(client.embed(np.array([" mktayi\nakqr* ", "mjk"])), expected)
        texts = ("MK1", "MK-T", "M.K", ">a\nMKT", "M*K", "", "MK\udc80")
        for sequence in (*texts, None, float("nan"), b"MKT", ("a", None), [1]):
            with pytest.raises(DataError):
                client.embed(["MKT", sequence])
        for call in (client.embed, client.stream, client.classify, client.search):
            for values in ("MKT", b"MKT", {"a": "MKT"}, None if call != client.search else 5):
                with pytest.raises(ConfigError, match="sequences: expected a list of str, found"):
                    call(values)
        for wrong in ({"ids": "P1"}, {"ids": [None]}, *({"ids": ["P1"], "top_k": number} for number in (0, None, "x"))):
            with pytest.raises(EsmerayError):
                next(client.search(**wrong))
        child = os.fork()
        if child == 0:  # a fork: its event loop has no thread
            signal.alarm(60)
            with pytest.raises(ForkedError, match="opened before this process was forked"):
                client.models()
            client.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    client.close()  # again
    with pytest.raises(ConfigError, match="this client is closed"):
        client.embed(["MKT"])
    for wrong in ({"address": None}, {"key": 5}, {"concurrency": 0}, {"retries": -1}, {"timeout_s": 0}):
        with pytest.raises(ConfigError):
            Client(**wrong)


BROKEN = {
    "a SOCKS proxy without its package": ("ALL_PROXY", "socks5://user:secret@127.0.0.1:9", "socksio"),
    "brackets": ("no_proxy", "[::1],localhost", "without \\[\\]"),
    "an unknown kind of proxy": ("https_proxy", "gopher://user:secret@127.0.0.1", "Unknown scheme"),
    "no certificates": ("SSL_CERT_FILE", "/nonexistent.pem", "No such file"),
}


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield
    huggingface_hub.close_session()  # the global session may have read a test's proxies


@pytest.mark.parametrize("fault", BROKEN)
def test_proxies_of_the_environment_are_ignored_for_this_machine(
    address: str, no_proxies: None, monkeypatch: pytest.MonkeyPatch, fault: str
):
    name, value, words = BROKEN[fault]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setenv(name, value)
    with Client(address, retries=0) as client:
        assert client.models()
    with pytest.raises(ConfigError, match=f"{name}: can't be used .*{words}") as refusal:
        Client("http://service.example:8000")
    assert "secret" not in str(refusal.value)
    with pytest.raises(ConfigError, match=name):  # the hub is a remote host, too
        model_folder("esmeray-tests/not-there", ["config.json"], "source")


def test_a_local_service_may_have_a_certificate_of_its_own_authority(no_proxies: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent.pem")
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        Client("https://127.0.0.1:8000")
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    Client("https://127.0.0.1:8000").close()


def test_the_client_works_where_an_event_loop_runs(address: str):
    async def notebook() -> tuple[Any, Any]:
        with Client(address) as client:
            return client.embed(["MKT"]), await asyncio.to_thread(client.embed, ["MKT"])

    here, in_a_thread = asyncio.run(notebook())
    np.testing.assert_array_equal(here, in_a_thread)


def test_a_stream_can_be_left_early_and_the_client_closed(address: str):
    client = Client(address)
    assert "client" in {thread.name for thread in threading.enumerate()}
    assert next(client.stream(random_sequences([20] * 30)))[0] == "0"
    assert len(client.embed(["MKT"])) == 1
    stream = client.stream(random_sequences([20] * 60))
    next(stream)
    client.close()
    stream.close()
    assert "client" not in {thread.name for thread in threading.enumerate()}


class Stub:
    """A server that answers with these statuses in order, then with 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.seen = list(statuses), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.seen += 1
        status = self.statuses.pop(0) if self.statuses else 200
        headers = [(b"content-type", b"application/json"), *([(b"retry-after", b"0")] if status == 429 else [])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        content = {"detail": "why", "data": [{"id": "esm"}]}
        body = b"Internal Server Error" if status == 500 else json.dumps(content).encode()  # as from Ray Serve itself
        await send({"type": "http.response.body", "body": body})


def test_overloaded_and_lost_requests_are_sent_again(serving: Serving):
    for statuses in [(429,), (503, 500, 503), (404, 503)]:
        stub = Stub(*statuses)
        with serving.address(stub) as address, Client(address) as client:
            assert client.models() == [{"id": "esm"}]
        assert stub.seen == len(statuses) + 1
    # The last status is from a proxy without a service.
    for status, retries, asked in [(422, 2, 1), (429, 2, 3), (404, 10, module.CONNECT_RETRIES + 1)]:
        stub = Stub(*[status] * 99)
        refused = pytest.raises(DataError, match=f"refused with {status}: why")
        with serving.address(stub) as address, Client(address, retries=retries) as client, refused:
            client.models()
        assert stub.seen == asked


def test_what_can_be_no_key_is_refused_and_not_repeated():
    for key in ("", "secret\nsecret", "sec ret", "secret\x7f", "secr\u00e9t", "secret\r"):
        with pytest.raises(ConfigError, match="key: holds no API key; a key is one word") as refused:
            Client(key=key)
        assert "secr" not in str(refused.value)


def test_an_address_without_a_service_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ResourceError, match="no answer"):
            Client(f"http://127.0.0.1:{taken.getsockname()[1]}", retries=1).models()
    for address in ("http://[", "ftp://127.0.0.1", "nowhere", "http://"):
        with pytest.raises(ConfigError, match="is not the address of a service; write it as"):
            Client(address)
