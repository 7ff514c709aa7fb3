"""Endpoints: answers to JSON, FASTA and arrays, in every response format, and refusals."""

import asyncio
import csv
import io
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.calibration import CALIBRATION_FILE, Calibration
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.inference.models.opening import open_model
from esmeray.service.contract import Reply
from esmeray.service.http import guard
from esmeray.service.http.answers import arrays_answer
from esmeray.service.http.models import Call
from esmeray.service.replicas.replica import ModelReplica
from esmeray.service.section import ServedModel
from tests.classifiers import classifier_config, export_tiny
from tests.model.support import random_sequences
from tests.service.serving import PRECISION, LostError, Serving, npy, problem

FASTA = {"Content-Type": "text/x-fasta"}
ONE = {"sequences": ["MKT"]}
SEQUENCES = random_sequences([12, 30, 5])
ARROW, NPY, PARQUET = "application/vnd.apache.arrow.stream", "application/x-npy", "application/vnd.apache.parquet"


@pytest.fixture(scope="module")
def vectors(client: httpx.Client) -> np.ndarray:
    data = client.post("/v1/embeddings", json={"input": SEQUENCES}).json()["data"]
    return np.array([item["embedding"] for item in data], np.float32)


@pytest.mark.parametrize("kind", [ARROW, NPY, PARQUET, "text/csv", f"text/html, {NPY};q=0.5"])
def test_fasta_with_fields_in_the_query_gives_every_kind_of_answer(client, vectors, kind: str):
    records = [f">P{number} a protein\r\n{text[:3].lower()}\n{text[3:]}*\n" for number, text in enumerate(SEQUENCES)]
    path = "/v1/encode?output=mean" if kind in (NPY, "text/csv") else "/v1/embeddings?model=esm&pooling=mean"
    answer = client.post(path, content="".join(records), headers={**FASTA, "Accept": kind})
    assert answer.status_code == 200 and answer.headers["content-type"].split(";")[0] in kind
    content = io.BytesIO(answer.content)
    if NPY in kind:
        np.testing.assert_array_equal(np.load(content), vectors)
        return
    if kind == "text/csv":
        names, *rows = csv.reader(io.StringIO(answer.text))
        assert names == ["id", *(f"embedding_{channel}" for channel in range(32))]
        ids, values = [row[0] for row in rows], np.array([row[1:] for row in rows], np.float32)
    else:
        table = pa.ipc.open_stream(content).read_all() if kind == ARROW else pq.read_table(content)
        ids, values = table["id"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32)
    assert ids == ["P0", "P1", "P2"]
    np.testing.assert_array_equal(values, vectors)


def test_classes_are_those_of_predict_with_what_was_cropped(client: httpx.Client, serving: Serving):
    texts = random_sequences([20, 150])
    for name in ("places", "helices"):
        wanted = ClassifierPipeline.load(serving.folder / name, device="cpu").predict(texts)
        answer = client.post("/v1/classify", json={"model": name, "sequences": texts}).json()
        shares = np.concatenate([np.atleast_2d(item["probabilities"]) for item in answer["data"]])
        np.testing.assert_allclose(shares, wanted.probabilities, rtol=1e-5, atol=1e-6)
        assert [item["cropped"] for item in answer["data"]] == [0, 50]
        assert [item["label"] for item in answer["data"]] == [label.replace("?", "") for label in wanted.labels()]
        assert answer["labels"] == list(wanted.label_space.names)
    refused = client.post("/v1/encode", json={"model": "places", "sequences": texts, "output": "classes"})
    assert "output: String should match pattern" in problem(refused, 422)  # `classes` belongs to /v1/classify


def rows_of(answer: httpx.Response) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows of a table, read with a library for its format."""
    content = io.BytesIO(answer.content)
    if answer.headers["content-type"].startswith("text/csv"):
        heads, *rows = csv.reader(io.StringIO(answer.text, newline=""))
        return heads, [[name, *map(float, values)] for name, *values in rows]
    table = pa.ipc.open_stream(content).read_all() if ARROW in str(answer.headers) else pq.read_table(content)
    return table.column_names, [[*row] for row in zip(*table.to_pydict().values(), strict=True)]


def test_tables_of_classes_have_a_column_with_the_name_of_each(client: httpx.Client, serving: Serving):
    body = {"model": "places", "sequences": [{"id": 'P,"1"', "sequence": "MKT"}, {"id": "P2", "sequence": "M" * 150}]}
    items = client.post("/v1/classify", json=body).json()["data"]
    for kind in ("text/csv", PARQUET, ARROW):
        heads, rows = rows_of(client.post("/v1/classify", json=body, headers={"Accept": kind}))
        assert heads == ["id", "cropped", "cytoplasm", "membrane", "nucleus"], kind
        assert [row[:2] for row in rows] == [['P,"1"', 0], ["P2", 50]]
        np.testing.assert_allclose([row[2:] for row in rows], [item["probabilities"] for item in items], rtol=1e-6)
    named = arrays_answer("text/csv", ["P0"], np.ones((1, 2)), "shares", None, ("id", 'a,"b"'))
    assert bytes(named.body).splitlines()[0] == b'"id","shares_id","a,""b"""'
    residues = client.post("/v1/classify", json={**body, "model": "helices"}, headers={"Accept": PARQUET})
    assert rows_of(residues)[0] == ["id", "cropped", "probabilities"]


def test_what_encode_gives_decode_takes_as_json_and_as_npy(client: httpx.Client):
    body = {"model": "autoencoder", "sequences": SEQUENCES}
    encoded = client.post("/v1/encode?output=latents", json=body).json()  # the query string may have fields, too
    assert encoded == client.post("/v1/encode", json={**body, "output": "latents"}).json()
    values = [item["values"] for item in encoded["data"]]
    answer = client.post("/v1/decode", json={"model": "autoencoder", "latents": values}).json()
    assert [len(item["sequence"]) for item in answer["data"]] == [12, 30, 5]
    for item in answer["data"]:
        best = [AMINO_ACIDS[column] for column in np.argmax(item["probabilities"], axis=1)]
        assert item["sequence"] == "".join(best) and np.allclose(np.sum(item["probabilities"], axis=1), 1, atol=1e-5)
    path, headers = "/v1/decode?model=autoencoder", {"Content-Type": NPY}
    assert client.post(path, content=npy(np.array(values[0])), headers=headers).json()["data"] == answer["data"][:1]


@pytest.mark.parametrize("method", ["wild_type", "masked"])
def test_scores_are_differences_of_log_probabilities(client: httpx.Client, method: str):
    sequence = SEQUENCES[1]
    mutations = [f"{sequence[0]}1W", f"{sequence[29]}30a"]
    body = {"sequences": [sequence], "mutations": mutations, "method": method}
    answer = client.post("/v1/masked", json=body).json()
    shares = np.array(answer["data"][0]["probabilities"])
    if method == "masked":
        for index in (0, 7, 29):
            text = f"{sequence[:index]}<mask>{sequence[index + 1 :]}"
            alone = client.post("/v1/masked", json={"sequences": [text]}).json()["data"][0]["probabilities"]
            np.testing.assert_allclose(shares[index], alone[index], rtol=1e-4, atol=1e-6)
    scores = [item["score"] for item in answer["mutations"]]
    for index, mutant, score in zip([0, 29], "WA", scores, strict=True):
        columns = [AMINO_ACIDS.index(letter) for letter in (mutant, sequence[index])]
        assert score == pytest.approx(-np.diff(np.log(shares[index][columns]))[0], abs=1e-5)
    query = {"mutations": mutations, "method": method}
    headers = {**FASTA, "Accept": "text/csv"}
    table = client.post("/v1/masked", params=query, content=f">0\n{sequence}\n", headers=headers).text.splitlines()
    assert table[0] == '"mutation","score"' and [line.split('"')[1] for line in table[1:]] == mutations


def test_a_pseudo_log_likelihood_is_computed_position_by_position(client: httpx.Client, serving: Serving):
    proteins = [*SEQUENCES, "MXK"]
    body = {"sequences": proteins, "output": "pseudo_log_likelihood"}
    values = [item["values"] for item in client.post("/v1/encode", json=body).json()["data"]]
    model = open_model(serving.folder / "esm", device="cpu")
    np.testing.assert_allclose(values, model.embed(proteins, "pseudo_log_likelihood"), rtol=1e-5)


def test_a_mask_is_one_residue_of_a_sequence(client: httpx.Client):
    body = {"sequences": ["m<mask>kt"], "mutations": ["K3A"]}
    answer = client.post("/v1/masked", json=body)
    assert answer.status_code == 200 and len(answer.json()["data"][0]["probabilities"]) == 4
    spellings = ["k3a", "p.Lys3Ala", "K3A:T4T", "T4C,K3A", "4c:3a", "WT"]
    scores = [
        item["score"] for item in client.post("/v1/masked", json=body | {"mutations": spellings}).json()["mutations"]
    ]
    assert {*scores[:3]} == {answer.json()["mutations"][0]["score"]} and scores[3] == scores[4] and scores[5] == 0
    for mutation in ("K8A", "K2A", "2A", "A1C", "K3", "K3*", "K0A", "NaN"):
        refused = client.post("/v1/masked", json={**body, "mutations": [mutation]})
        assert problem(refused, 422).startswith("mutations.0:")
    assert "single sequence" in problem(client.post("/v1/masked", json={**body, "sequences": ["MK", "MK"]}), 422)


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/v1/embeddings", {"input": "MK", "model": "Nope-Secret"}, 404, "no such model; there are esm, "),
    ("/v1/embeddings", {"input": [{"id": "P7", "sequence": "MK1T"}]}, 422, "record P7: the letter at position 3"),
    ("/v1/embeddings", {"input": ["MKT", "M\u017fK"]}, 422, "record 1: the letter at position 2"),
    ("/v1/embeddings", {"input": ["MKT", " *"]}, 422, "record 1: the sequence is empty"),
    ("/v1/embeddings", {"input": "MKT", "dimensions": 7}, 422, "dimensions: the model has 32"),
    ("/v1/embeddings", {"input": ["MK"] * 51}, 413, "51 sequences, more than 50"),
    ("/v1/embeddings", {"input": ["MK", "M" * 401]}, 422, "record 1: 401 residues, more than 400"),
    ("/v1/embeddings", {"input": ["M" * 400] * 6}, 413, "2,400 residues, more than 2,000"),
    ("/v1/embeddings", {"input": ["MK", 5]}, 422, "input.1: must be a sequence, or an object with id and sequence"),
    ("/v1/embeddings", {"input": [{"id": "a"}]}, 422, "input.0.sequence: Field required"),
    ("/v1/encode", [], 422, "the body must be a JSON object with model, sequences, output"),
    ("/v1/encode", {"sequences": ["MK"], "output": "latents"}, 422, "model esm has no latents; it has cls, logits"),
    ("/v1/encode", {"sequences": ["MK"], "output": "decoded"}, 422, "output: String should match pattern"),
    ("/v1/encode?output=max", {"sequences": ["MK"], "output": "max"}, 422, "output: is in the query of the address"),
    (
        "/v1/encode?outptu=max",
        {"sequences": ["MK"]},
        422,
        "parameter 'outptu' (did you mean output?); there are model, output",
    ),
    ("/v1/encode?output=max&output=mean", {"sequences": ["MK"]}, 422, "output: Input should be a valid string"),
    (
        "/v1/encode",
        {"sequences": ["MK"], "ouput": "max"},
        422,
        "unknown field 'ouput' (did you mean output?); there are",
    ),
    (
        "/v1/masked",
        {"sequences": ["MK"], "methd": "masked"},
        422,
        "unknown field 'methd' (did you mean method?); there are",
    ),
    ("/v1/search", {"ids": ["P0"], "topk": 50}, 422, "unknown field 'topk' (did you mean top_k?); there are"),
    ("/v1/search", {"ids": ["P0"], "model": "places"}, 422, "model: index proteins is of esm; name another index"),
    (
        "/v1/encode",
        {"sequences": ["MK", {"id": "a", "seq": "MK"}]},
        422,
        "sequences.1: unknown field 'seq'; there are id, sequence",
    ),
    ("/v1/encode", {"sequences": ["MK", None]}, 422, "sequences.1: must be a sequence, or an object"),
    ("/v1/encode", {"sequences": ["MK", "MKT", float("nan")]}, 422, "sequences.2: must be a sequence, or an object"),
    ("/v1/encode", {"sequences": [[5, 7]]}, 422, "sequences.0: must be a sequence, or an object"),
    (
        "/v1/encode",
        {"sequences": [{"id": "a", "sequence": None}]},
        422,
        "sequences.0.sequence: Input should be a valid",
    ),
    ("/v1/masked", {"sequences": ["MK"], "mutations": ["K2R"] * 9}, 413, "9 mutations, more than 8"),
    ("/v1/masked", {"sequences": ["M" * 400] * 5, "method": "masked"}, 413, "masking each position takes 800,000"),
    (
        "/v1/encode",
        {"sequences": ["M" * 400] * 5, "output": "pseudo_log_likelihood"},
        413,
        "masking each position takes 800,000",
    ),
    ("/v1/masked", {"sequences": ["M<mask>"], "method": "masked"}, 422, "masks every position itself"),
    ("/v1/decode", {"latents": [[[1.0] * 8]]}, 422, "model esm has no decoded"),
    ("/v1/decode", {"model": "autoencoder", "latents": [[[1.0] * 7]]}, 422, "latents.0: must be (residues, 8)"),
    ("/v1/decode", {"model": "autoencoder", "latents": [[[10**400] * 8]]}, 422, "latents.0: must be (residues, 8)"),
    ("/v1/nothing", {}, 404, "no such address"),
]


def test_refusals_say_what_where_and_what_to_do(client):
    for path, body, status, words in REFUSED:
        answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert words in problem(answer, status), (path, body)
        assert "Secret" not in answer.text and "MK1T" not in answer.text
    for path in ("/v1/models", "/page.js", "/health", "/openapi.json"):
        assert "has an unknown parameter 'a'; there are none" in problem(client.get(f"{path}?a=1"), 422)


def test_head_is_answered_as_get_without_a_body_and_nowhere_else(client: httpx.Client):
    client.get("/v1/models")  # loads the models
    for path, status in {"/v1/models/esm": 200, "/docs": 200, "/": 200, "/v1/encode": 405, "/no": 404}.items():
        head, get = client.head(path), client.get(path)
        assert (head.content, head.status_code, get.status_code) == (b"", status, status), path
        assert head.headers["content-type"] == get.headers["content-type"]
    for path, methods in {"/health": "GET, HEAD", "/metrics": "GET, HEAD", "/": "GET, HEAD, POST"}.items():
        refused = client.delete(path)
        assert problem(refused, 405) == f"this address takes {methods}" and refused.headers["allow"] == methods


def test_other_kinds_of_bodies_and_answers_and_large_ones_are_refused(client: httpx.Client):
    assert "Content-Type names it" in problem(client.post("/v1/encode", content=b'{"sequences":["MK"]}'), 415)
    residues = {**ONE, "output": "residues"}
    assert "answers are" in problem(client.post("/v1/encode", json=residues, headers={"Accept": "text/html"}), 406)
    assert "CSV" in problem(client.post("/v1/encode", json=residues, headers={"Accept": "text/csv"}), 406)
    assert problem(client.get("/v1/encode"), 405)
    assert "FASTA starts" in problem(client.post("/v1/encode", content="MKT", headers=FASTA), 400)
    compressed = client.post("/v1/encode", content=b"\x1f\x8b", headers={**FASTA, "Content-Encoding": "gzip, identity"})
    assert "without compression" in problem(compressed, 415)
    for content in (b" " * 200_001, (b" " * 50_000 for _ in range(1000))):  # by Content-Length, and while it arrives
        assert "200,000 bytes" in problem(client.post("/v1/encode", content=content, headers=FASTA), 413)


@contextmanager
def begun_body(client: httpx.Client) -> Iterator[socket.socket]:
    """A connection with an unfinished request, which has sent one of nine bytes of its body."""
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=20) as connection:
        head = b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(head + b"Content-Type: text/plain\r\nContent-Length: 9\r\n\r\n>")
        yield connection


def test_a_slow_body_is_refused(serving: Serving, monkeypatch):
    monkeypatch.setattr(guard, "BODY_S", 0.05)
    with serving.client() as client:
        with begun_body(client) as connection:
            assert connection.recv(10_000).startswith(b"HTTP/1.1 408")
        assert client.post("/v1/encode", json=ONE).status_code == 200


def changed(call: Call, before: Callable[[], Awaitable[Reply | None]]) -> Call:
    """Wrap a call: ``before`` runs first, and its reply, if any, replaces the model's."""

    async def run(*arguments: Any) -> Reply:
        return await before() or await call.run(*arguments)

    return call._replace(run=run)


async def set_event(event: asyncio.Event) -> None:
    event.set()


def test_too_many_requests_at_once_and_too_slow_answers_are_refused(serving: Serving, monkeypatch):
    monkeypatch.setattr(guard, "REQUESTS", 1)
    until = asyncio.Event()

    async def wait() -> None:
        await until.wait()

    async def ask(client: httpx.Client) -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=30) as asking:
            slow = asyncio.create_task(asking.post("/v1/encode", json=ONE))
            while (refused := await asking.get("/health")).is_success:
                pass
            return refused, await slow

    calls = {"esm": changed(serving.calls["esm"], wait)}
    with serving.client(calls, limits={"timeout_s": 0.5}) as client:
        refused, slow = asyncio.run(ask(client))
        assert "too many requests at once" in problem(refused, 429) and refused.headers["retry-after"] == "1"
        assert "no answer within 0.5 s" in problem(slow, 504)
        serving.run(set_event(until))
        assert client.post("/v1/encode", json=ONE).status_code == 200


def test_a_lost_replica_is_tried_again_once(serving: Serving, caplog):
    errors: list[type[Exception]] = []

    async def fail() -> None:
        if errors:
            raise errors.pop()("MKTSECRET")

    with serving.client({"esm": changed(serving.calls["esm"], fail)}) as client:
        for raised, status in ([LostError], 200), ([LostError, LostError], 503), ([OSError], 500), ([], 200):
            errors.extend(raised)
            answer = client.post("/v1/encode", json=ONE)
            assert answer.status_code == status and (answer.is_success or problem(answer, status))
            assert ("retry-after" in answer.headers) == (status == 503) and "SECRET" not in answer.text
        assert "esmeray_replicas_lost_total 3.0" in client.get("/metrics").text
    assert sum("request" in record.message and record.exc_info is not None for record in caplog.records) == 1


def test_a_classifier_of_texts_takes_any_language_and_no_empty_one(serving: Serving, tmp_path: Path):
    served = ServedModel(name="text", source=str(export_tiny(tmp_path / "text", source="qwen2")), **PRECISION)
    replica = ModelReplica(served.model_dump(), "cpu", "1")
    with serving.client({"text": Call(replica.about, replica.run, replica.tokens)}) as client:
        answer = client.post("/v1/classify", json={"sequences": ["a cell divides", "Zürich 12.50 €"]})
        assert [item["cropped"] for item in answer.json()["data"]] == [0, 0]
        assert "at least one letter" in problem(client.post("/v1/classify", json={"sequences": [""]}), 422)
        # Protein sequences may be cut; a text that is too long is refused.
        body = {"inputs": "a cell divides", "truncate": True}
        assert {item["label"] for item in client.post("/", json=body).json()} == {"cytoplasm", "membrane", "nucleus"}
        long = client.post("/", json={**body, "inputs": "a cell divides " * 30})
        assert long.status_code == 422 and "more than 100; send a shorter one" in long.json()["error"]


@pytest.mark.parametrize("kind", ["multiclass", "regression", "per_residue"])
def test_a_calibrated_classifier_answers_with_sets(serving: Serving, tmp_path: Path, kind: Any):
    labels = {"label_columns": ["stability", "activity"]} if kind == "regression" else {}
    folder = export_tiny(tmp_path / "model", classifier_config(kind, labels=labels))
    thresholds = [[0.6] * 950] * (2 if kind == "regression" else 1)
    fingerprint = ClassifierPipeline.load(folder, device="cpu").model.facts.fingerprint
    calibration = Calibration(fingerprint=fingerprint, kind=kind, records=19, temperature=3.0, thresholds=thresholds)
    calibration.save(folder / CALIBRATION_FILE)
    replica = ModelReplica(ServedModel(name="a", source=str(folder), **PRECISION).model_dump(), "cpu", "1")
    with serving.client({"a": Call(replica.about, replica.run, replica.tokens)}) as client:
        body = {"sequences": ["MKTAYIAKQR"], "coverage": 0.9}
        (item,) = client.post("/v1/classify", json=body).json()["data"]
        predicted = ClassifierPipeline.load(folder, device="cpu", coverage=0.9).predict(body["sequences"])
        np.testing.assert_allclose(np.atleast_2d(item["probabilities"]), predicted.probabilities, atol=1e-6)
        if kind == "regression":
            np.testing.assert_allclose(item["upper"], np.array(item["probabilities"]) + 0.6, atol=1e-6)
        else:
            assert (item["set"] if kind == "per_residue" else [item["set"]]) == predicted.sets()
        assert "at least 99 with a target" in problem(client.post("/v1/classify", json={**body, "coverage": 0.99}), 422)
        assert "only application/json" in problem(
            client.post("/v1/classify", json=body, headers={"Accept": ARROW}), 406
        )
        assert "set" not in client.post("/v1/classify", json={"sequences": ["MKT"]}).json()["data"][0]


def test_health_comes_before_models_and_ready_after(serving: Serving):
    loaded = asyncio.Event()

    async def about() -> Any:
        await loaded.wait()
        return await serving.calls["esm"].about()

    with serving.client({"esm": serving.calls["esm"]._replace(about=about)}) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert "being loaded" in problem(client.get("/ready"), 503)
        serving.run(set_event(loaded))
        assert client.get("/v1/models").json()["data"][0]["id"] == "esm"
        assert client.get("/ready").json() == {"status": "ready", "models": ["esm"]}


def test_a_start_up_hook_that_is_no_function_is_refused(serving: Serving):
    for name in ("nowhere:mark", "json:nothing", "json"):
        with pytest.raises(ConfigError, match=f"startup_hook: {name}: can't be imported .*name it as MODULE:FUNCTION"):
            serving.app(startup_hook=name)


def test_request_ids_are_kept_or_made(client: httpx.Client):
    kept = client.get("/no", headers={"X-Request-ID": "run-1:2"})
    assert kept.json()["request_id"] == kept.headers["x-request-id"] == "run-1:2"
    wrong = [{"X-Request-ID": text} for text in ("a b", b"\xe9" * 9, "", "a" * 65)]
    made = {client.get("/health", headers=headers).headers["x-request-id"] for headers in wrong}
    assert {len(text) for text in made} == {32} and len(made) == 4


def test_the_log_has_a_line_of_json_for_a_request_and_no_sequence(client: httpx.Client, caplog):
    caplog.set_level(logging.INFO, "esmeray.service")
    secret = "WWWWHHHHCCCC"
    headers = {"X-Request-ID": "logged", "Authorization": "Bearer esm-K"}
    client.post("/v1/encode", json={"sequences": [secret]}, headers=headers)
    client.post("/v1/encode", json={"sequences": [f"{secret}1"]})
    client.post("/v1/encode", content=secret, headers=FASTA)
    client.get("/health")  # the log line is written after the answer and before the next request is read
    logged = [json.loads(record.message) for record in caplog.records if record.name == "esmeray.service"]
    lines = [line for line in logged if line["endpoint"] == "encode"]  # an earlier request's line may be late
    facts = {"request": "logged", "endpoint": "encode", "status": 200, "key": "anybody", "model": "esm"}
    assert lines[0].items() >= {**facts, "sequences": 1, "residues": 12}.items()
    assert [line["status"] for line in lines] == [200, 422, 400]
    assert secret not in caplog.text and "esm-K" not in caplog.text


def test_metrics_parse_and_count(serving: Serving):
    with serving.client() as client:
        for texts in (["MKT", "MK"], ["MKT"], ["1"]):
            client.post("/v1/encode", json={"sequences": texts})
        client.post("/v1/masked", json={"sequences": ["M<mask>T"]})
        page = client.get("/metrics").text
    families = text_string_to_metric_families(page)
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples["esmeray_requests_total", "encode", "200"] == 2
    assert samples["esmeray_request_seconds_count", "encode"] == 3
    assert (samples["esmeray_sequences_total", "esm"], samples["esmeray_residues_total", "esm"]) == (4, 11)
    assert sum(value for (name, *_), value in samples.items() if name == "esmeray_replica_tokens") > 0
