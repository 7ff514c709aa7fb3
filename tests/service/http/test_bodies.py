"""No request body makes the service fail, echo the body, or send a long answer."""

import json
import os
import random
import socket
import string
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from esmeray.service.http import app
from esmeray.service.http.refusals import printable
from tests.service.serving import Serving, npy, problem
from tests.structures import folds, pdb_lines

BAD_BODIES = int(os.environ.get("ESMERAY_BAD_BODIES", "20"))
ROUTES = (
    "/",
    *(
        route.path
        for module in app.ROUTES
        for route in module.router.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    ),
)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[httpx.Client]:
    limits = {"sequence_residues": 60, "residues": 200, "sequences": 10, "body_bytes": 10**6}
    with serving.client(limits=limits) as client:
        yield client


def refused(answer: httpx.Response) -> bool:
    """Check that an answer is a success or a short refusal without internals; return whether it is a refusal."""
    if answer.is_success:
        return False
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert len(answer.content) <= 4096 and "Traceback" not in answer.text and ".py" not in answer.text
    assert isinstance(answer.json(), dict) and "application/" in answer.headers["content-type"]
    return True


BAD_JSON = {
    "100,000 brackets": b"[" * 100_000,
    "100,000 braces": b'{"a":' * 100_000,
    "invalid UTF-8": b'{"sequences":["\xff\xfe"],"input":"\xff"}',
    "a lone surrogate": b'{"sequences":["MK\\ud800"],"inputs":"\\udfff","input":"\\ud800"}',
    "a byte order mark": b'\xef\xbb\xbf{"sequences":["MK"]}',
    "nothing": b"",
    "NUL": b'\x00{"sequences":["MK"]}',
    "90,000 faults": b'{"sequences":[%s]}' % b",".join([b"1"] * 90_000),
}


def test_what_is_no_json_is_refused(client: httpx.Client):
    for kind, content in BAD_JSON.items():
        for path in ROUTES:
            answer = client.post(path, content=content, headers=JSON)
            assert refused(answer) and answer.status_code in (400, 413, 422), (kind, path)


def sent(client: httpx.Client, content: bytes) -> bytes:
    """Send raw bytes, which may be invalid HTTP, and return the whole response."""
    answers = b""
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=20) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while received := connection.recv(65536):
            answers += received
    return answers


def test_paths_lead_nowhere_else(client: httpx.Client):
    for path in ("/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/page.js/../../app.py", "/v1/models/"):
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert sent(client, request.encode()).startswith(b"HTTP/1.1 404"), path


def test_an_id_is_echoed_without_control_characters_in_json_that_is_whole(client: httpx.Client):
    for name in ("a\x00b\x1b[2J\nc", "\u202eabc", "\U0001f600" * 256, '"' * 256, "\\" * 256):
        answer = client.post("/v1/embeddings", json={"input": [{"id": name, "sequence": "1"}]})
        detail = problem(answer, 422)
        assert "the letter at position 1" in detail and detail.isprintable() and answer.json()["record"].isprintable()
    answer = client.post("/v1/embeddings", json={"input": [{"id": "a" * 257, "sequence": "M"}]})
    assert "at most 256" in problem(answer, 422)


def with_header(header: bytes) -> bytes:
    padded = header + b" " * 20 + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + b"\0" * 64


WHOLE = npy(np.zeros((3, 8), np.float32))
BAD_NPY = {
    "a zip file": b"PK\x03\x04" + bytes(99),
    "a Python pickle": npy(np.array([{"a": 1}], dtype=object)),
    "a shape of terabytes": with_header(b"{'descr':'<f4','fortran_order':False,'shape':(9999999999999,)}"),
    "a shape of brackets": with_header(b"{'descr':'<f4','fortran_order':False,'shape':" + b"(" * 900 + b"}"),
    "a truncated body": WHOLE[:-1],
    "NaN": npy(np.full((3, 8), np.nan)),
    "nothing": b"",
}


def test_what_is_no_array_of_numbers_is_refused(client: httpx.Client):
    headers = {"Content-Type": "application/x-npy"}
    assert client.post("/v1/decode?model=autoencoder", content=WHOLE, headers=headers).is_success
    for kind, content in BAD_NPY.items():
        answer = client.post("/v1/decode?model=autoencoder", content=content, headers=headers)
        assert refused(answer) and answer.status_code in (400, 422), kind


WORDS = st.sampled_from(
    ["MK", "", "mk*", "M<mask>K", "<", "M\x00", "ß", "\U0001f600", "M" * 61, "A1G", "masked", "residues", "esm"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["id", "sequence", "x"]), inner, max_size=3)
        | st.fixed_dictionaries({"id": inner, "sequence": inner})
    ),
    max_leaves=10,
)
FIELDS = ("model", "sequences", "input", "inputs", "latents", "output", "mutations", "method", "encoding_format")
OTHERS = ("dimensions", "pooling", "normalize", "truncate", "truncation_direction", "add_special_tokens", "user")
OBJECTS = st.dictionaries(st.sampled_from([*FIELDS, *OTHERS]), VALUES, max_size=8)
LIKELY = st.builds(
    lambda fields, model, texts: {**fields, "model": model, "sequences": texts, "input": texts, "inputs": texts},
    OBJECTS,
    st.sampled_from(["esm", "autoencoder", "places", "helices", "folds", None]),
    st.lists(WORDS | st.text(string.ascii_letters + ".-<*", max_size=9), max_size=4),
)
RECORD = {"id": "P1", "sequence": "MKT"}
ANSWERED: dict[str, dict[str, Any]] = {
    **{path: {"inputs": [RECORD]} for path in ("/", "/embed", "/embed_all", "/tokenize")},
    **{path: {"sequences": [RECORD]} for path in ("/v1/encode", "/v1/masked", "/v1/search", "/v1/tokenize")},
    "/v1/embeddings": {"input": [RECORD]},
    "/v1/classify": {"model": "places", "sequences": [RECORD]},
    "/v1/decode": {"model": "autoencoder", "latents": [[[0.5] * 8]]},
    "/v1/design": {"model": "folds", "structure": "\n".join(pdb_lines(folds(1)[0])[:80]), "number": 1},
    "/predict": {"inputs": [[RECORD]]},
}
"""A valid body per route."""
NAMES = st.sampled_from([*FIELDS, *OTHERS, "top_k", "ids", "index", "raw_scores", "encoding", "prompt_name"])
MISSPELLED = st.one_of(
    NAMES,
    NAMES.map(str.upper),
    NAMES.map(lambda name: name[:-1]),
    NAMES.map(lambda name: f"{name}s"),
    NAMES.map(lambda name: name.replace("_", "-")),
    st.text(max_size=50),
)
KINDS = st.sampled_from(["application/json", "text/x-fasta", "application/x-npy", "text/plain", "a", ""])
PIECES = st.sampled_from([b">", b"\n", b">a b\n", b"MKT", b"\r", b"\xff", b"\x00", b"*", b" "])


@settings(max_examples=BAD_BODIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=(OBJECTS | LIKELY | VALUES).map(lambda value: json.dumps(value).encode())
    | st.binary()
    | st.lists(PIECES, max_size=9).map(b"".join),
    kind=KINDS,
    seed=st.integers(0, 2**32),
)
def test_no_body_makes_a_route_fail(client: httpx.Client, body: bytes, kind: str, seed: int):
    draw = random.Random(seed)
    broken = body[: draw.randrange(len(body) + 1)] if draw.random() < 0.2 else body
    accept = draw.choice(["*/*", "application/x-npy", "text/csv", "application/vnd.apache.arrow.stream", "a/b"])
    for path in draw.sample(ROUTES, 3):  # a sample: all routes for each body would take minutes
        refused(client.post(path, content=broken, headers={"Content-Type": kind, "Accept": accept}))


@pytest.fixture(scope="module")
def fields(client: httpx.Client) -> dict[str, set[str]]:
    """Names of the fields per route, from the schema of /docs."""
    paths = client.get("/openapi.json").json()["paths"]
    bodies = {path: route["post"]["requestBody"]["content"] for path, route in paths.items() if "post" in route}
    found = {path: set(body["application/json"]["schema"]["properties"]) for path, body in bodies.items()}
    assert {"/", *found} == ANSWERED.keys() == {*ROUTES}
    return {**found, "/": found["/embed"]}


def test_a_body_with_known_fields_is_answered(client: httpx.Client):
    answers = {path: client.post(path, json=body) for path, body in ANSWERED.items()}
    assert [path for path, answer in answers.items() if answer.is_error] == ["/predict"]
    assert "model esm has no classes" in answers["/predict"].json()["error"]


@settings(max_examples=5 * BAD_BODIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(ROUTES), name=MISSPELLED, value=VALUES, place=st.sampled_from(["body", "record", "query"]))
def test_an_unknown_field_is_named_wherever_it_is(
    client: httpx.Client, fields: dict[str, set[str]], path: str, name: str, value: Any, place: str
):
    body: Any = json.loads(json.dumps(ANSWERED[path]))
    if place == "record" and path not in ("/v1/decode", "/v1/design"):
        ((entry, records),) = ((entry, item) for entry, item in body.items() if isinstance(item, list))
        assume(name not in RECORD)
        (records[0][0] if path == "/predict" else records[0])[name] = value
    else:
        assume(name not in fields[path] and name)
        entry = ""
        if place != "query":
            body[name] = value
    query = {name: "1"} if place == "query" else {}
    answer = client.post(path, params=query, content=json.dumps(body), headers=JSON)
    said = answer.json()
    message = said["detail"] if "detail" in said else said["error"]
    assert answer.status_code == 422 and repr(printable(name, longest=40)) in message, message
    assert message.startswith(entry) and ("parameter" if place == "query" else "unknown field") in message
    if "detail" in said:
        assert said["error"]["message"] == message and said["error"]["type"] == "invalid_request_error"
    else:
        assert said == {"error": message, "error_type": "Validation"}


@pytest.mark.slow
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_schema_says_what_the_service_does(client: httpx.Client, data: st.DataObject):
    assert client.get("/v1/models").is_success  # loads the models, so that /ready succeeds
    schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    for operation in schema.get_all_operations():
        case = data.draw(operation.ok().as_strategy())
        case.call_and_validate(base_url=str(client.base_url), checks=checks)
