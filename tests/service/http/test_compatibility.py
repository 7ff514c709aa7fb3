"""Clients of OpenAI, text-embeddings-inference and BioNeMo's NIM work unchanged."""

import io
import json
import subprocess
import zipfile

import httpx
import numpy as np
import openai
import pytest

from tests.service.serving import Serving, problem

SEQUENCES = ["MKTAYIAKQR", "MSI"]


def vectors(client: httpx.Client, output: str = "mean") -> list[np.ndarray]:
    data = client.post("/v1/encode", json={"sequences": SEQUENCES, "output": output}).json()["data"]
    return [np.array(each["values"]) for each in data]


def test_openais_client_gets_vectors_in_each_encoding_and_the_models(client: httpx.Client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as asked:
        default = asked.embeddings.create(model="esm", input=SEQUENCES)  # base64 on the wire
        floats = asked.embeddings.create(model="esm", input=SEQUENCES, encoding_format="float")
        one = asked.embeddings.create(model="esm", input=SEQUENCES[0], dimensions=32, user="me")
        for found in (default.data, floats.data, one.data):
            for each, wanted in zip(found, vectors(client), strict=False):
                np.testing.assert_allclose(each.embedding, wanted, rtol=1e-6)
        assert (len(default.data), len(one.data), default.usage.total_tokens) == (2, 1, 17)
        assert [model.id for model in asked.models.list()] == ["esm", "autoencoder", "places", "helices"]
        with pytest.raises(openai.NotFoundError) as unknown:
            asked.embeddings.create(model="text-embedding-3-small", input="MKT")
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            asked.embeddings.create(model="esm", input=["MKT", "1"])
        assert "no such model" in str(unknown.value.body)
        assert "record 1: the letter at position 1" in str(refused.value.body)


def curl(client: httpx.Client, path: str, body: str | None = None) -> object:
    """As text-embeddings-inference documents it."""
    post = [] if body is None else ["-X", "POST", "-d", body, "-H", "Content-Type: application/json"]
    done = subprocess.run(["curl", "-s", f"{client.base_url}{path}", *post], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_documented_requests_of_text_embeddings_inference_are_answered(client: httpx.Client):
    (found,) = curl(client, "/embed", '{"inputs":"MKTAYIAKQR"}')  # type: ignore[misc]
    wanted = vectors(client)[0]
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), rtol=1e-5)
    plain = curl(client, "/embed", json.dumps({"inputs": SEQUENCES, "normalize": False}))
    np.testing.assert_allclose(plain, vectors(client), rtol=1e-5)  # type: ignore[arg-type]
    for each, rows in zip(
        curl(client, "/embed_all", json.dumps({"inputs": SEQUENCES})), vectors(client, "residues"), strict=True
    ):  # type: ignore[call-overload]
        np.testing.assert_allclose(each, rows, rtol=1e-5)
    (tokens,) = curl(client, "/tokenize", '{"inputs":"MKT"}')  # type: ignore[misc]
    assert tokens[0] == {"id": 0, "text": "<cls>", "special": True}
    assert tokens[2] == {"id": 15, "text": "K", "special": False, "start": 1, "stop": 2} and len(tokens) == 5
    info = curl(client, "/info")
    facts = {"model_dtype": "float32", "max_client_batch_size": 50, "max_input_length": 400, "max_batch_tokens": 128}
    assert info.items() >= facts.items()  # type: ignore[attr-defined]


def test_refusals_have_the_body_of_text_embeddings_inference(client: httpx.Client):
    for body, status, kind in [({"inputs": "MK1"}, 422, "validation"), ({"inputs": "M" * 401}, 422, "validation")]:
        answer = client.post("/embed", json=body)
        assert (answer.status_code, answer.json()["error_type"], set(answer.json())) == (
            status,
            kind,
            {"error", "error_type"},
        )
    truncated = client.post("/embed", json={"inputs": "M" * 450, "truncate": True, "normalize": False})
    whole = client.post("/embed", json={"inputs": "M" * 400, "normalize": False})
    assert truncated.status_code == 200 and truncated.json() == whole.json()
    assert (
        client.post("/embed", content="{", headers={"Content-Type": "application/json"}).json()["error_type"] == "empty"
    )


def test_the_esm2_nim_runs_the_model_once(serving: Serving):
    asked: list[object] = []
    call = serving.calls["esm"]

    async def run(output: str, *arguments: object) -> object:
        asked.append(output)
        return await call.run(output, *arguments)

    with serving.client({**serving.calls, "esm": call._replace(run=run)}) as client:
        assert client.post("/v1/biology/meta/esm2-650m", json={"sequences": SEQUENCES}).status_code == 200
    assert asked == ["residues"]


def test_the_esm2_nim_gives_npz_of_one_sequence_and_zip_of_many(client: httpx.Client):
    path, means, rows = "/v1/biology/meta/esm2-650m", vectors(client), vectors(client, "residues")
    one = np.load(io.BytesIO(client.post(path, json={"sequences": SEQUENCES[:1], "format": "npz"}).content))
    np.testing.assert_allclose(one["embeddings"], means[0][None], rtol=1e-5)
    np.testing.assert_allclose(one["representations"], rows[0][None], rtol=1e-5)
    with zipfile.ZipFile(io.BytesIO(client.post(path, json={"sequences": SEQUENCES}).content)) as archive:
        files = [np.load(io.BytesIO(archive.read(name))) for name in ("0.npz", "1.npz")]
    assert [each["representations"].shape for each in files] == [(1, 10, 32), (1, 3, 32)]
    np.testing.assert_allclose(files[1]["embeddings"], means[1][None], rtol=1e-5)
    assert "Input should be 'npz'" in problem(client.post(path, json={"sequences": ["MK"], "format": "h5"}), 422)
