"""Clients of OpenAI and text-embeddings-inference work unchanged: requests succeed, or the client shows the reason."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from esmeray.inference.classifier import ClassifierPipeline
from esmeray.service.contract import Reply
from esmeray.service.http.access import new_key
from tests.model.support import random_sequences
from tests.service.serving import Serving

SEQUENCES = ["MKTAYIAKQR", "MSI"]
LONG = random_sequences([450])[0]
"""A sequence fifty residues longer than the service's maximum."""


def vectors(client: httpx.Client, output: str = "mean", sequences: list[str] = SEQUENCES) -> list[np.ndarray]:
    data = client.post("/v1/encode", json={"sequences": sequences, "output": output}).json()["data"]
    return [np.array(item["values"]) for item in data]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def of_openai(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as asked:
        yield asked


def test_openais_client_gets_vectors_in_each_encoding_and_the_models(client: httpx.Client, of_openai: openai.OpenAI):
    default = of_openai.embeddings.create(model="esm", input=SEQUENCES)  # base64 on the wire
    floats = of_openai.embeddings.create(model="esm", input=SEQUENCES, encoding_format="float")
    one = of_openai.embeddings.create(model="esm", input=SEQUENCES[0], dimensions=32, user="me")
    wanted = vectors(client)
    for answer in (default, floats, one):
        assert [item.index for item in answer.data] == [*range(len(answer.data))]
        for item, vector in zip(answer.data, wanted, strict=False):
            np.testing.assert_allclose(item.embedding, vector, rtol=1e-6)
    assert (len(default.data), len(one.data), default.usage.total_tokens) == (2, 1, 17)
    listed = of_openai.models.list().data
    assert [model.id for model in listed] == ["esm", "autoencoder", "places", "helices", "folds"]
    assert of_openai.models.retrieve("places") == listed[2]
    null = {"input": SEQUENCES, "model": None, "encoding_format": None, "dimensions": None, "user": None}
    assert client.post("/v1/embeddings", json=null).json() == json.loads(floats.model_dump_json())


REFUSED_BY_OPENAI: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": ["MKT", ""]}, "record 1: the sequence is empty", None),
    ({"input": ["MKT", "1"]}, "record 1: the letter at position 1", None),
    ({"input": [[0, 20, 15], [4]]}, "input.0: must be a sequence, or an object .*; not .* token ids", "input.0"),
    ({"input": [0, 20, 15]}, "input.0: must be a sequence, or an object .*; not .* token ids", "input.0"),
    ({"input": ["MKT", None]}, "input.1: must be a sequence, or an object .*; not a number, null", "input.1"),
    ({"input": "MKT", "dimensions": 16}, "dimensions: the model has 32", "dimensions"),
    ({"input": "MKT", "extra_body": {"truncate_prompt_tokens": 2}}, "unknown field 'truncate_prompt_tokens'", None),
    ({"input": "MKT", "extra_query": {"dimension": 2}}, r"parameter 'dimension' \(did you mean dimensions\?\)", None),
]


def test_openais_client_shows_the_reason_of_each_refusal(serving: Serving, of_openai: openai.OpenAI, tmp_path):
    for arguments, words, param in REFUSED_BY_OPENAI:
        with pytest.raises(openai.UnprocessableEntityError, match=f"^Error code: 422 - .*{words}") as refused:
            of_openai.embeddings.create(model="esm", **arguments)
        assert (refused.value.type, refused.value.param) == ("invalid_request_error", param)
    with pytest.raises(openai.APIStatusError, match="413 - 51 sequences, more than 50"):
        of_openai.embeddings.create(model="esm", input=["MK"] * 51)
    with pytest.raises(openai.APIStatusError, match="413 - the body has more than 200,000 bytes"):
        of_openai.embeddings.create(model="esm", input="M" * 200_000)
    for name in ("text-embedding-3-small", "facebook/esm2_t6_8M_UR50D"):
        with pytest.raises(openai.NotFoundError, match="404 - no such model; there are esm, ") as unknown:
            of_openai.embeddings.create(model=name, input="MKT")
        with pytest.raises(openai.NotFoundError, match="404 - no such model; there are esm, "):
            of_openai.models.retrieve(name)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="404 - no such address; see /docs"):
        of_openai.completions.create(model="esm", prompt="MKT")
    refusals = [Reply(refused="overloaded", retry_after_s=7), Reply(refused="model", detail="NaN"), OSError()]
    refusals.append(Reply(refused="unavailable", detail="out of memory"))

    async def refuse(*_: Any) -> Reply:
        refusal = refusals.pop(0)
        if isinstance(refusal, OSError):
            raise refusal
        return refusal

    (tmp_path / "keys.yaml").write_text(f"[{new_key('a')[1].model_dump_json(exclude_none=True)}]")
    with (
        serving.client({"esm": serving.calls["esm"]._replace(run=refuse)}) as client,
        serving.client(access={"keys": str(tmp_path / "keys.yaml")}) as guarded,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as asked,
        openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="none", max_retries=0) as stranger,
    ):
        for words, retry_after in (
            ("429 - too many tokens are waiting", "7"),
            ("500 - NaN", None),
            ("500 - the service failed", None),
            ("503 - esm: out of memory", "2"),
        ):
            with pytest.raises(openai.APIStatusError, match=f"^Error code: {words}") as late:
                asked.embeddings.create(model="esm", input="MKT")
            assert late.value.response.headers.get("retry-after") == retry_after
        with pytest.raises(openai.AuthenticationError, match="401 - the key is wrong"):
            stranger.embeddings.create(model="esm", input="MKT")
    assert refusals == []


def test_the_documented_requests_of_text_embeddings_inference_are_answered(client: httpx.Client):
    wanted = vectors(client)
    (vector,) = client.post("/embed", json={"inputs": "MKTAYIAKQR"}).json()
    np.testing.assert_allclose(vector, unit(wanted[0]), rtol=1e-5)
    plain = client.post("/embed", json={"inputs": SEQUENCES, "normalize": False, "dimensions": 32}).json()
    np.testing.assert_allclose(plain, wanted, rtol=1e-5)
    rows = client.post("/embed_all", json={"inputs": SEQUENCES}).json()
    for of_one, wanted_rows in zip(rows, vectors(client, "residues"), strict=True):
        np.testing.assert_allclose(of_one, wanted_rows, rtol=1e-5)
    (tokens,) = client.post("/tokenize", json={"inputs": "MKT", "prompt_name": None}).json()
    assert tokens[0] == {"id": 0, "text": "<cls>", "special": True}
    assert tokens[2] == {"id": 15, "text": "K", "special": False, "start": 1, "stop": 2} and len(tokens) == 5
    facts = {"model_dtype": "float32", "max_client_batch_size": 50, "max_input_length": 400, "max_batch_tokens": 128}
    assert client.get("/info").json().items() >= facts.items()


@pytest.mark.parametrize("direction", ["left", "right", "Left", "Right", None])
def test_what_is_too_long_is_cut_at_the_end_that_is_named(client: httpx.Client, direction: str | None):
    part = LONG[-400:] if (direction or "").lower() == "left" else LONG[:400]
    body = {"truncate": True, **({"truncation_direction": direction} if direction else {})}
    (wanted,) = vectors(client, sequences=[part])
    for text in (LONG, f" {LONG.lower()}* "):  # `*`, the end of a translation, is not a residue
        (vector,) = client.post("/embed", json={"inputs": text, "normalize": False, **body}).json()
        np.testing.assert_allclose(vector, wanted, rtol=1e-5, atol=1e-6)
        (rows,) = client.post("/embed_all", json={"inputs": text, **body}).json()
        np.testing.assert_allclose(np.mean(rows, axis=0), wanted, rtol=1e-4, atol=1e-5)
    short = client.post("/embed", json={"inputs": "MKT", **body}).json()
    assert short == client.post("/embed", json={"inputs": "MKT"}).json()
    found = InferenceClient(model=str(client.base_url)).feature_extraction(
        LONG,
        truncate=True,
        truncation_direction=direction,  # type: ignore[arg-type]
        normalize=False,
        dimensions=32,
    )
    np.testing.assert_allclose(found, [wanted], rtol=1e-5, atol=1e-6)


REFUSED_BY_TEI: list[tuple[dict[str, Any], str]] = [
    ({"inputs": LONG}, "record 0: 450 residues, more than 400"),
    ({"inputs": LONG, "truncation_direction": "left"}, "record 0: 450 residues, more than 400"),
    ({"inputs": "MKT", "truncate": True, "truncation_direction": "middle"}, "truncation_direction: Input should be"),
    ({"inputs": "MKT", "truncate": "yes"}, "truncate: Input should be a valid boolean"),
    (
        {"inputs": f"{LONG[:420]}-{LONG[420:]}", "truncate": True},
        "record 0: the letter at position 421 is not a residue",
    ),
    ({"inputs": "MKT", "prompt_name": "query"}, "prompt_name: Input should be None"),
    ({"inputs": "MKT", "dimensions": 8}, "dimensions: the model has 32"),
    ({"inputs": "MKT", "dimension": 8}, "unknown field 'dimension' (did you mean dimensions?)"),
    ({"inputs": "MKT", "model": "places"}, "unknown field 'model'; there are inputs, prompt_name, "),
    ({"inputs": [[0, 20, 15]]}, "inputs.0: must be a sequence, or an object with id and sequence; not a number"),
    ({"inputs": ["MKT", None]}, "inputs.1: must be a sequence"),
    ({"inputs": []}, "inputs: List should have at least 1 item"),
]


def test_the_bodies_of_refusals_are_those_of_text_embeddings_inference(client: httpx.Client):
    for path in ("/embed", "/"):
        for body, words in REFUSED_BY_TEI:
            answer = client.post(path, json=body)
            assert answer.status_code == 422 and set(answer.json()) == {"error", "error_type"}, answer.text
            assert words in answer.json()["error"] and answer.json()["error_type"] == "Validation"
    for path in ("/embed", "/", "/predict"):
        broken = client.post(path, content="{", headers={"Content-Type": "application/json"})
        assert (broken.status_code, broken.json()["error_type"]) == (400, "Empty")
    assert client.post("/rerank", json={}).json() == {"error": "no such address; see /docs", "error_type": "Validation"}
    dimensions = client.post("/embed_all", json={"inputs": "MKT", "dimensions": 32})
    assert "unknown field 'dimensions'; there are inputs, prompt_name, truncate" in dimensions.json()["error"]
    asked = InferenceClient(model=str(client.base_url), provider="hf-inference")
    with pytest.raises(HfHubHTTPError, match="prompt_name: Input should be None"):
        asked.feature_extraction("MKT", prompt_name="query")
    with pytest.raises(HfHubHTTPError, match="unknown field 'encoding_format'; there are"):
        asked.feature_extraction("MKT", encoding_format="base64")
    assert asked.health_check() and asked.get_endpoint_info()["model_id"] == "esm"


def test_a_classifier_predicts_at_the_root_and_by_its_route(serving: Serving):
    pipeline = ClassifierPipeline.load(serving.folder / "places", device="cpu")
    texts = [LONG[:30], LONG[-100:]]
    wanted = pipeline.predict(texts).probabilities
    names = np.array(pipeline.label_space.names)
    with serving.client({"places": serving.calls["places"], "helices": serving.calls["helices"]}) as client:
        for path in ("/", "/predict"):
            body = {"inputs": [[texts[0]], [LONG]], "truncate": True, "truncation_direction": "left"}
            rows = client.post(path, json={**body, "raw_scores": False}).json()
            one = client.post(path, json={"inputs": texts[0]}).json()
            for row, shares in zip([*rows, one], [*wanted, wanted[0]], strict=True):
                order = np.argsort(-shares)
                assert [item["label"] for item in row] == names[order].tolist()
                np.testing.assert_allclose([item["score"] for item in row], shares[order], rtol=1e-5)
            for refused in (["MKT", "MKT"], [["MKT", "MKT"]], [[]], [], [[None]], {"source_sentence": "MKT"}):
                assert client.post(path, json={"inputs": refused}).json()["error_type"] == "Validation"
            for fields in ({"raw_scores": True}, {"parameters": {"top_k": 1}}, {"normalize": True}, {"top_k": 1}):
                refused = client.post(path, json={"inputs": "MKT", **fields})
                assert refused.status_code == 422 and next(iter(fields)) in refused.json()["error"]
            assert "101 residues, more than 100" in client.post(path, json={"inputs": LONG[:101]}).json()["error"]
        best = InferenceClient(model=str(client.base_url)).text_classification(texts[0])
        assert best.label == names[wanted[0].argmax()]  # type: ignore[attr-defined]
        labels = client.get("/info").json()["model_type"]["classifier"]
        assert labels["id2label"] == {str(number): name for number, name in enumerate(names)}
    with serving.client({"helices": serving.calls["helices"]}) as client:
        assert "use POST /v1/classify" in client.post("/", json={"inputs": "MKT"}).json()["error"]
