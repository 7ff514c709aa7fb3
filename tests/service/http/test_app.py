"""Endpoints: what comes back for JSON, FASTA and arrays, in every kind of answer, and what is refused."""

import asyncio
import base64
import csv
import io
import json
import logging
import socket
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.service.http.models import Call
from tests.model.support import random_sequences
from tests.service.serving import LostError, Serving, problem

FASTA = {"Content-Type": "text/x-fasta"}
SEQUENCES = random_sequences([12, 30, 5])
RECORDS = [{"id": f"P{number}", "sequence": sequence} for number, sequence in enumerate(SEQUENCES)]
ARROW, NPY, PARQUET = "application/vnd.apache.arrow.stream", "application/x-npy", "application/vnd.apache.parquet"


@pytest.fixture(scope="module")
def vectors(client: httpx.Client) -> np.ndarray:
    data = client.post("/v1/embeddings", json={"input": SEQUENCES}).json()["data"]
    return np.array([each["embedding"] for each in data], np.float32)


def test_embeddings_come_in_order_with_usage_and_base64_equals_float(client: httpx.Client, vectors: np.ndarray):
    answer = client.post(
        "/v1/embeddings", json={"input": RECORDS, "encoding_format": "base64", "dimensions": 32}
    ).json()
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]
    np.testing.assert_array_equal(found, vectors)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 47 + 6, "total_tokens": 47 + 6} and answer["model"] == "esm"


@pytest.mark.parametrize("path", ["/v1/encode?output=mean", "/v1/embeddings?model=esm&pooling=mean"])
@pytest.mark.parametrize("kind", [ARROW, NPY, PARQUET, "text/csv", f"text/html, {NPY};q=0.5"])
def test_fasta_with_fields_in_the_query_gives_every_kind_of_answer(client, vectors, path: str, kind: str):
    fasta = "".join(
        f">{each['id']} a protein\r\n{each['sequence'][:3].lower()}\n{each['sequence'][3:]}*\n" for each in RECORDS
    )
    answer = client.post(path, content=fasta, headers={**FASTA, "Accept": kind})
    assert answer.status_code == 200 and answer.headers["content-type"].split(";")[0] in kind
    if NPY in kind:
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), vectors)
        return
    if kind == "text/csv":
        names, *rows = csv.reader(io.StringIO(answer.text))
        assert names == ["id", *(f"embedding_{channel}" for channel in range(32))]
        ids, found = [row[0] for row in rows], np.array([row[1:] for row in rows], np.float32)
    else:
        content = io.BytesIO(answer.content)
        table = pa.ipc.open_stream(content).read_all() if kind == ARROW else pq.read_table(content)
        ids, found = table["id"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32)
    assert ids == ["P0", "P1", "P2"]
    np.testing.assert_array_equal(found, vectors)


def test_classes_are_those_of_predict_with_what_was_cropped(client: httpx.Client, serving: Serving):
    texts = random_sequences([20, 150])
    for name in ("places", "helices"):
        wanted = ClassifierPipeline.load(serving.folder / name, device="cpu").predict(texts)
        answer = client.post("/v1/classify", json={"model": name, "sequences": texts}).json()
        found = np.concatenate([np.atleast_2d(each["probabilities"]) for each in answer["data"]])
        np.testing.assert_allclose(found, wanted.probabilities, rtol=1e-5, atol=1e-6)
        assert [each["cropped"] for each in answer["data"]] == [0, 50]
        labels = [label.replace("?", "") for label in wanted.labels()]
        assert [each["label"] for each in answer["data"]] == labels and answer["labels"] == list(
            wanted.label_space.names
        )


def test_what_encode_gives_decode_takes_as_json_and_as_npy(client: httpx.Client, serving: Serving):
    latents = client.post(
        "/v1/encode", json={"model": "autoencoder", "sequences": SEQUENCES, "output": "latents"}
    ).json()
    values = [each["values"] for each in latents["data"]]
    answer = client.post("/v1/decode", json={"model": "autoencoder", "latents": values}).json()
    assert [len(each["sequence"]) for each in answer["data"]] == [12, 30, 5]
    for each in answer["data"]:
        best = [AMINO_ACIDS[column] for column in np.argmax(each["probabilities"], axis=1)]
        assert each["sequence"] == "".join(best) and np.allclose(np.sum(each["probabilities"], axis=1), 1, atol=1e-5)
    buffer = io.BytesIO()
    np.save(buffer, np.array(values[0]))
    headers = {"Content-Type": NPY}
    again = client.post("/v1/decode?model=autoencoder", content=buffer.getvalue(), headers=headers).json()
    assert again["data"] == answer["data"][:1]


def test_scores_are_differences_of_log_probabilities(client: httpx.Client):
    sequence, mutations = SEQUENCES[1], [f"{SEQUENCES[1][0]}1W", f"{SEQUENCES[1][29]}30A"]
    one_by_one = []
    for place in range(30):
        text = f"{sequence[:place]}<mask>{sequence[place + 1 :]}"
        one_by_one.append(
            client.post("/v1/masked", json={"sequences": [text]}).json()["data"][0]["probabilities"][place]
        )
    for method in ("wild_type", "masked"):
        body = {"sequences": [sequence], "mutations": mutations, "method": method}
        answer = client.post("/v1/masked", json=body).json()
        rows = np.array(answer["data"][0]["probabilities"])
        if method == "masked":
            np.testing.assert_allclose(rows, one_by_one, rtol=1e-4, atol=1e-6)
        for place, mutant, found in zip([0, 29], "WA", answer["mutations"], strict=True):
            wanted = np.log(rows[place][AMINO_ACIDS.index(mutant)] / rows[place][AMINO_ACIDS.index(sequence[place])])
            assert found["score"] == pytest.approx(wanted, abs=1e-5)
        table = client.post("/v1/masked", json=body, headers={"Accept": "text/csv"}).text.splitlines()
        assert table[0] == '"mutation","score"' and [line.split('"')[1] for line in table[1:]] == mutations
        values = np.load(
            io.BytesIO(client.post("/v1/masked", json=body, headers={"Accept": "application/x-npy"}).content)
        )
        np.testing.assert_allclose(values, [found["score"] for found in answer["mutations"]], atol=1e-5)
        in_query = client.post(
            "/v1/masked", params={"mutations": mutations, "method": method}, content=f">0\n{sequence}\n", headers=FASTA
        )
        assert in_query.json() == answer


def test_a_mask_is_one_residue_of_a_place_and_lower_case_is_taken_beside_it(client: httpx.Client):
    body = {"sequences": ["m<mask>kt"], "mutations": ["K3A"]}
    answer = client.post("/v1/masked", json=body)
    assert answer.status_code == 200 and len(answer.json()["data"][0]["probabilities"]) == 4
    for mutation in ("K8A", "K2A", "A1C", "K3", "k3a", "K0A"):
        assert problem(client.post("/v1/masked", json={**body, "mutations": [mutation]}), 422).startswith(
            "mutations.0:"
        )
    assert "single sequence" in problem(client.post("/v1/masked", json={**body, "sequences": ["MK", "MK"]}), 422)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/embeddings", {"input": "MK", "model": "Nope-Secret"}, 404, "no such model; there are esm, "),
    ("/v1/embeddings", {"input": [{"id": "P7", "sequence": "MK1T"}]}, 422, "record P7: the letter at position 3"),
    ("/v1/embeddings", {"input": ["MKT", "M\u017fK"]}, 422, "record 1: the letter at position 2"),
    ("/v1/embeddings", {"input": ["MKT", "ss\u00df"]}, 422, "record 1: the letter at position 3"),
    ("/v1/embeddings", {"input": "MK<mask>"}, 422, "record 0: the letter at position 3"),
    ("/v1/embeddings", {"input": ["MKT", " *"]}, 422, "record 1: the sequence is empty"),
    ("/v1/embeddings", {"input": "MKT", "dimensions": 7}, 422, "dimensions: the model has 32"),
    ("/v1/embeddings", {"input": ["MK"] * 51}, 413, "51 sequences, more than 50"),
    (
        "/v1/embeddings",
        {"input": [{"id": "long", "sequence": "M" * 401}]},
        422,
        "record long: 401 residues, more than 400",
    ),
    ("/v1/embeddings", {"input": ["M" * 400] * 6}, 413, "2,400 residues, more than 2,000"),
    ("/v1/embeddings", {"input": []}, 422, "input: List should have at least 1 item"),
    ("/v1/embeddings", {"input": 5}, 422, "input: must be a sequence, or a list of at least one"),
    ("/v1/embeddings", {"input": ["MK", 5]}, 422, "input.1: must be a sequence, or an object with id and sequence"),
    ("/v1/embeddings", {"input": [{"id": "a"}]}, 422, "input.0.sequence: Field required"),
    ("/v1/masked", {"sequences": ["MK"], "mutations": ["K2R"] * 9}, 413, "9 mutations, more than 8"),
    ("/v1/encode", {"sequences": ["MK"], "output": "latents"}, 422, "model esm has no latents; it has cls, logits"),
    ("/v1/classify", {"sequences": ["MK"]}, 422, "model esm has no classes"),
    ("/v1/masked", {"sequences": ["M" * 400] * 5, "method": "masked"}, 413, "masking each position takes 800,000"),
    ("/v1/masked", {"sequences": ["M<mask>"], "method": "masked"}, 422, "masks every position itself"),
    ("/v1/decode", {"latents": [[[1.0] * 8]]}, 422, "model esm has no decoded"),
    ("/v1/decode", {"model": "autoencoder", "latents": [[[1.0] * 7]]}, 422, "latents.0: must be (residues, 8)"),
    ("/v1/decode", {"model": "autoencoder", "latents": [[[10**400] * 8]]}, 422, "latents.0: must be (residues, 8)"),
    ("/v1/nothing", {}, 404, "no such address"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_refusals_say_what_where_and_what_to_do(client, path: str, body: dict[str, Any], status: int, words: str):
    answer = client.post(path, json=body)
    assert words in problem(answer, status)
    assert "Secret" not in answer.text and "MK1T" not in answer.text


@pytest.mark.parametrize("body", [[], "MKT", 5])
def test_a_body_that_is_no_object_gets_a_sentence_with_its_fields(client: httpx.Client, body: Any):
    answer = client.post("/v1/encode", json=body)
    assert problem(answer, 422) == "the body must be an object of JSON with model, sequences, output"


def test_fields_in_the_query_stand_beside_json_as_beside_fasta(client: httpx.Client):
    body = {"sequences": SEQUENCES}
    wanted = client.post("/v1/encode", json={**body, "output": "max"}).json()
    assert client.post("/v1/encode?output=max", json=body).json() == wanted
    twice = client.post("/v1/encode?output=max", json={**body, "output": "max"})
    assert "output: is in the query of the address and in the body" in problem(twice, 422)


@pytest.mark.parametrize(
    ("method", "path", "accepted"),
    [
        ("POST", "/v1/encode?outptu=max", "there are model, output"),
        ("POST", "/v1/encode?sequences=MK", "there are model, output"),
        ("POST", "/v1/decode?dtype=a", "there are model"),
        ("GET", "/v1/models?limit=5", "there are none"),
        ("GET", "/page.js?v=1", "there are none"),
        ("GET", "/health?verbose=1", "there are none"),
        ("GET", "/openapi.json?a=1", "there are none"),
    ],
)
def test_unknown_parameters_in_the_query_are_refused_everywhere(client, method: str, path: str, accepted: str):
    answer = client.request(method, path, json={"sequences": ["MK"]} if method == "POST" else None)
    assert problem(answer, 422) == f"the query of the address has an unknown parameter; {accepted}"


def test_other_refusals(client: httpx.Client):
    assert "Content-Type names it" in problem(client.post("/v1/encode", content=b'{"sequences":["MK"]}'), 415)
    body = {"sequences": ["MK"], "output": "residues"}
    assert "answers are" in problem(client.post("/v1/encode", json=body, headers={"Accept": "text/html"}), 406)
    assert "CSV" in problem(client.post("/v1/encode", json=body, headers={"Accept": "text/csv"}), 406)
    assert problem(client.get("/v1/encode"), 405)
    assert "FASTA starts" in problem(client.post("/v1/encode", content="MKT", headers=FASTA), 400)
    assert "send application/json" in problem(
        client.post("/v1/encode", content="a", headers={"Content-Type": "a/b"}), 415
    )


def test_a_large_body_is_refused_by_its_length_and_while_it_arrives(client: httpx.Client):
    assert "200,000 bytes" in problem(client.post("/v1/encode", content=b" " * 200_001, headers=FASTA), 413)
    chunks = (b" " * 50_000 for _ in range(1000))
    assert "200,000 bytes" in problem(client.post("/v1/encode", content=chunks, headers=FASTA), 413)


def test_a_slow_body_is_refused(serving: Serving):
    with serving.client(limits={"body_s": 0.05}) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=20) as connection:
            head = b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\n"
            connection.sendall(head + b"Content-Type: text/plain\r\nContent-Length: 9\r\n\r\n>")
            assert connection.recv(10_000).startswith(b"HTTP/1.1 408")
        assert client.post("/v1/encode", json={"sequences": ["MK"]}).status_code == 200


def waiting_call(call: Call, until: asyncio.Event) -> Call:
    """The same, whose results come once ``until`` is set."""

    async def run(*given: Any) -> Any:
        await until.wait()
        return await call.run(*given)

    return call._replace(run=run)


def test_too_many_requests_at_once_and_too_slow_answers_are_refused(serving: Serving):
    until = asyncio.Event()
    body = {"sequences": ["MKT"]}
    calls = {"esm": waiting_call(serving.calls["esm"], until)}

    async def ask(client: httpx.Client) -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=30) as asking:
            slow = asyncio.create_task(asking.post("/v1/encode", json=body))
            while (refused := await asking.get("/health")).is_success:
                pass
            return refused, await slow

    with serving.client(calls, limits={"requests": 1, "timeout_s": 0.5}) as client:
        refused, slow = asyncio.run(ask(client))
        assert "too many requests at once" in problem(refused, 429) and refused.headers["retry-after"] == "1"
        assert "no answer within 0.5 s" in problem(slow, 504)
        serving.run(_set(until))
        assert client.post("/v1/encode", json=body).status_code == 200


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_lost_replica_is_tried_again_once_and_what_fails_keeps_its_connection(serving: Serving, caplog):
    fails: list[type[Exception]] = []

    async def run(*given: Any) -> Any:
        if fails:
            raise fails.pop()("MKTSECRET")
        return await serving.calls["esm"].run(*given)

    with serving.client({"esm": serving.calls["esm"]._replace(run=run)}) as client:
        statuses = []
        for some in ([LostError], [LostError, LostError], [OSError], []):
            fails.extend(some)
            answer = client.post("/v1/encode", json={"sequences": ["MKT"]})
            statuses.append(answer.status_code)
            assert answer.is_success or problem(answer, answer.status_code)
            assert ("retry-after" in answer.headers) == (answer.status_code == 503)
        assert statuses == [200, 503, 500, 200]
        assert "esmeray_replicas_lost_total 3.0" in client.get("/metrics").text
        assert "SECRET" not in answer.text
    assert sum("request" in record.message and record.exc_info is not None for record in caplog.records) == 1


def test_an_overloaded_replica_is_429_with_the_time_to_come_back(serving: Serving):
    from esmeray.service.contract import Reply

    async def run(*_: Any) -> Any:
        return Reply(refused=kinds.pop(0), retry_after_s=7, detail="out of memory")

    kinds = ["memory", "model", "overloaded"]
    with serving.client({"esm": serving.calls["esm"]._replace(run=run)}) as client:
        found = [client.post("/v1/encode", json={"sequences": ["MKT"]}) for _ in range(3)]
    assert [(each.status_code, each.headers.get("retry-after")) for each in found] == [
        (503, "2"),
        (500, None),
        (429, "7"),
    ]


def test_health_comes_before_models_and_ready_after(serving: Serving):
    loaded = asyncio.Event()

    async def about() -> Any:
        await loaded.wait()
        return await serving.calls["esm"].about()

    with serving.client({"esm": serving.calls["esm"]._replace(about=about)}) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert "being loaded" in problem(client.get("/ready"), 503)
        serving.run(_set(loaded))
        assert client.get("/v1/models").json()["data"][0]["id"] == "esm"
        assert client.get("/ready").json() == {"status": "ready", "models": ["esm"]}


@pytest.mark.parametrize("name", ["nowhere:mark", "json:nothing", "json"])
def test_a_start_up_hook_that_is_no_function_is_refused(serving: Serving, name: str):
    with pytest.raises(ConfigError, match=f"startup_hook: {name}: can't be imported .*name it as MODULE:FUNCTION"):
        serving.app(startup_hook=name)


def test_request_ids_are_kept_or_made(client: httpx.Client):
    assert client.get("/health", headers={"X-Request-ID": "run-1:2"}).headers["x-request-id"] == "run-1:2"
    bad = [{"X-Request-ID": given} for given in ("a b", b"\xe9" * 9, "", "a" * 65)]
    made = [client.get("/health", headers=given).headers["x-request-id"] for given in bad]
    assert all(len(each) == 32 for each in made) and len(set(made)) == 4
    refused = client.get("/no", headers={"X-Request-ID": "run-3"})
    assert refused.json()["request_id"] == refused.headers["x-request-id"] == "run-3"


def test_the_log_has_a_line_of_json_for_a_request_and_no_sequence(client: httpx.Client, caplog):
    caplog.set_level(logging.INFO, "esmeray.service")
    secret = "WWWWHHHHCCCC"
    client.post(
        "/v1/encode", json={"sequences": [secret]}, headers={"X-Request-ID": "logged", "Authorization": "Bearer esm-K"}
    )
    client.post("/v1/encode", json={"sequences": [f"{secret}1"]})
    client.post("/v1/encode", content=secret, headers=FASTA)
    client.get("/health")  # a line is written after its answer, and before the next request is read
    found = [json.loads(record.message) for record in caplog.records if record.name == "esmeray.service"]
    lines = [line for line in found if line["endpoint"] == "encode"]  # one before may have been late
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
    samples = {
        (sample.name, *(sample.labels.get(label, "") for label in ("endpoint", "status", "model"))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["esmeray_requests_total", "encode", "200", ""] == 2
    assert samples["esmeray_requests_total", "encode", "422", ""] == 1
    assert samples["esmeray_request_seconds_count", "encode", "", ""] == 3
    assert samples["esmeray_sequences_total", "", "", "esm"] == 4
    assert samples["esmeray_residues_total", "", "", "esm"] == 11
    assert samples["esmeray_requests_ongoing", "", "", ""] == 1
    assert samples["esmeray_replica_tokens", "", "", "esm"] > 0 and samples["esmeray_replica_hits", "", "", "esm"] >= 1
