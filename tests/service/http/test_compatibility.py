"""Clients of OpenAI, text-embeddings-inference and BioNeMo's NIM work unchanged."""

import io
import json
import zipfile
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.service.serving import Serving, problem

SEQUENCES = ["MKTAYIAKQR", "MSI"]
NIM = "/v1/biology/meta/esm2-650m"


def vectors(client: httpx.Client, output: str = "mean") -> list[np.ndarray]:
    data = client.post("/v1/encode", json={"sequences": SEQUENCES, "output": output}).json()["data"]
    return [np.array(item["values"]) for item in data]


def test_openais_client_gets_vectors_in_each_encoding_and_the_models(client: httpx.Client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as asked:
        default = asked.embeddings.create(model="esm", input=SEQUENCES)  # base64 on the wire
        floats = asked.embeddings.create(model="esm", input=SEQUENCES, encoding_format="float")
        one = asked.embeddings.create(model="esm", input=SEQUENCES[0], dimensions=32, user="me")
        wanted = vectors(client)
        for answer in (default, floats, one):
            assert [item.index for item in answer.data] == [*range(len(answer.data))]
            for item, vector in zip(answer.data, wanted, strict=False):
                np.testing.assert_allclose(item.embedding, vector, rtol=1e-6)
        assert (len(default.data), len(one.data), default.usage.total_tokens) == (2, 1, 17)
        assert [model.id for model in asked.models.list()] == ["esm", "autoencoder", "places", "helices"]
        with pytest.raises(openai.NotFoundError) as unknown:
            asked.embeddings.create(model="text-embedding-3-small", input="MKT")
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            asked.embeddings.create(model="esm", input=["MKT", "1"])
    assert "no such model" in str(unknown.value.body)
    assert "record 1: the letter at position 1" in str(refused.value.body)


def test_the_documented_requests_of_text_embeddings_inference_are_answered(client: httpx.Client):
    wanted = vectors(client)
    (vector,) = client.post("/embed", json={"inputs": "MKTAYIAKQR"}).json()
    np.testing.assert_allclose(vector, wanted[0] / np.linalg.norm(wanted[0]), rtol=1e-5)
    plain = client.post("/embed", json={"inputs": SEQUENCES, "normalize": False}).json()
    np.testing.assert_allclose(plain, wanted, rtol=1e-5)
    rows = client.post("/embed_all", json={"inputs": SEQUENCES}).json()
    for of_one, wanted_rows in zip(rows, vectors(client, "residues"), strict=True):
        np.testing.assert_allclose(of_one, wanted_rows, rtol=1e-5)
    (tokens,) = client.post("/tokenize", json={"inputs": "MKT"}).json()
    assert tokens[0] == {"id": 0, "text": "<cls>", "special": True}
    assert tokens[2] == {"id": 15, "text": "K", "special": False, "start": 1, "stop": 2} and len(tokens) == 5
    facts = {"model_dtype": "float32", "max_client_batch_size": 50, "max_input_length": 400, "max_batch_tokens": 128}
    assert client.get("/info").json().items() >= facts.items()


def test_text_embeddings_inference_truncates_what_is_too_long_and_has_its_own_body_of_refusals(client: httpx.Client):
    body = {"inputs": "M" * 450, "normalize": False}
    whole = client.post("/embed", json={**body, "inputs": "M" * 400})
    assert client.post("/embed", json={**body, "truncate": True}).json() == whole.json()
    for content, status, kind in ((json.dumps(body), 422, "validation"), ("{", 400, "empty")):
        answer = client.post("/embed", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
        assert set(answer.json()) == {"error", "error_type"}


def test_the_esm2_nim_gives_npz_of_one_sequence_and_zip_of_many_and_runs_the_model_once(serving: Serving):
    asked: list[object] = []
    call = serving.calls["esm"]

    async def run(output: str, *arguments: Any) -> Any:
        asked.append(output)
        return await call.run(output, *arguments)

    with serving.client({**serving.calls, "esm": call._replace(run=run)}) as client:
        means, rows = vectors(client), vectors(client, "residues")
        asked.clear()
        one = np.load(io.BytesIO(client.post(NIM, json={"sequences": SEQUENCES[:1], "format": "npz"}).content))
        many = client.post(NIM, json={"sequences": SEQUENCES}).content
        assert asked == ["residues"] * 2
        assert "Input should be 'npz'" in problem(client.post(NIM, json={"sequences": ["MK"], "format": "h5"}), 422)
    with zipfile.ZipFile(io.BytesIO(many)) as archive:
        files = [np.load(io.BytesIO(archive.read(name))) for name in ("0.npz", "1.npz")]
    for number, file in enumerate([*files, one]):
        np.testing.assert_allclose(file["embeddings"], means[number % 2][None], rtol=1e-5)
        np.testing.assert_allclose(file["representations"], rows[number % 2][None], rtol=1e-5)
