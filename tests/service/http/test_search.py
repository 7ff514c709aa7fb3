"""The service finds the index's own hits, also for many queries at once. It skips searches without a waiting caller."""

import io
import os
import shutil
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest

from esmeray.common.errors import DataError
from esmeray.inference.index.search import open_index
from esmeray.service.client import Client
from esmeray.service.http.answers import ARROW, NPY
from esmeray.service.http.models import Call, Models
from esmeray.service.replicas import index_replica
from esmeray.service.replicas.index_replica import IndexReplica
from esmeray.service.section import ServedIndex
from tests.model.support import random_sequences
from tests.service.serving import Serving, eventually, problem

SEQUENCES = random_sequences([20, 40, 9], seed=11)


def found(answer: httpx.Response) -> list[list[tuple[str, float]]]:
    """Ids and scores of the hits per query."""
    assert answer.status_code == 200, answer.text
    return [[(hit["id"], hit["score"]) for hit in item["neighbours"]] for item in answer.json()["data"]]


def test_sequences_and_ids_give_the_neighbours_of_the_index_itself(serving: Serving, client: httpx.Client):
    encoded = client.post("/v1/encode", json={"sequences": SEQUENCES}, headers={"Accept": NPY})
    index = open_index(serving.index)
    rows, scores = index.search(np.load(io.BytesIO(encoded.content)), 5)
    wanted = [[*zip(index.ids(row), values.tolist(), strict=True)] for row, values in zip(rows, scores, strict=True)]
    answer = client.post("/v1/search", json={"sequences": SEQUENCES, "top_k": 5})
    assert found(answer) == wanted
    assert answer.json().items() >= {"index": "proteins", "model": "esm", "metric": "cosine"}.items()
    fasta = "".join(f">q{number}\n{sequence}\n" for number, sequence in enumerate(SEQUENCES))
    headers = {"Content-Type": "text/x-fasta", "Accept": ARROW}
    table = client.post("/v1/search?index=proteins&top_k=5", content=fasta, headers=headers)
    columns = pa.ipc.open_stream(table.content).read_all().to_pydict()
    assert columns["query"][::5] == ["q0", "q1", "q2"] and columns["rank"][:6] == [1, 2, 3, 4, 5, 1]
    assert [*zip(columns["target"], columns["score"], strict=True)] == [hit for hits in wanted for hit in hits]
    ids = index.ids([3, 30])
    own, _ = index.search(index.vectors(np.array([3, 30])), 40)
    by_id = found(client.post("/v1/search", json={"ids": ids, "top_k": 39}))
    for name, row, hits in zip(ids, own, by_id, strict=True):
        assert [hit for hit, _ in hits] == [other for other in index.ids(row) if other != name]
    with Client(str(client.base_url)) as by_client:
        assert [item["neighbours"] for item in by_client.search(SEQUENCES, top_k=5)] == [
            item["neighbours"] for item in answer.json()["data"]
        ]
        items = by_client.search(ids=ids, top_k=12_000)
        assert [len(item["neighbours"]) for item in items] == [39, 39], "by a request for each"
    listed = client.get("/v1/models").json()["data"]
    assert [[one["name"] for one in model["indexes"]] for model in listed] == [["proteins"], [], [], [], []]


def test_what_can_not_be_searched_is_refused(serving: Serving, client: httpx.Client):
    for body, status, words in [
        ({"sequences": ["MKT"], "index": "none"}, 404, "no such index; there are proteins"),
        ({}, 422, "give either sequences, or ids of the index"),
        ({"sequences": ["MKT"], "ids": ["P00000"]}, 422, "give either sequences, or ids"),
        ({"ids": ["P00000", "nobody"]}, 422, "record nobody: index proteins has no such id"),
        ({"sequences": ["MKT"], "top_k": 0}, 422, "top_k: Input should be greater than or equal to 1"),
        *(({"sequences": ["MKT"], "top_k": number}, 422, "top_k: Input should be") for number in (True, "3", 2.0)),
        ({"sequences": ["M1"]}, 422, "record 0: the letter at position 2 is not a residue"),
        ({"sequences": ["MKT"] * 30, "top_k": 1000}, 413, "30,000 neighbours, more than 20,000"),
    ]:
        assert words in problem(client.post("/v1/search", json=body), status)
    # The model has been replaced since.
    reply = serving.run(serving.index_replica.run(np.ones((1, 32), np.float32), 3, "of another", "me"))
    assert reply.refused == "model" and "of another model than the served one" in reply.detail
    served = ServedIndex(name="proteins", source=str(serving.index))
    problems = []
    for model in ("esm", "autoencoder"):
        replica = IndexReplica(served.model_dump(), model, "1")
        calls = {"proteins": Call(replica.about, replica.run)}
        problems.append(serving.run(Models(serving.calls, index_calls=calls).mismatch()))
    assert not problems[0] and "indexes: proteins: its vectors are of " in problems[1]


def test_a_truncated_index_is_refused_at_once(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "index"
    shutil.copytree(serving.index, folder)
    part = folder / "parts" / "00000.safetensors"
    served = ServedIndex(name="proteins", source=str(folder)).model_dump()
    kept: list[str] = []
    monkeypatch.setattr(
        index_replica,
        "first_record",
        lambda name, version, record="": kept.append(record) or next(filter(None, kept), ""),
    )

    def searched(client: httpx.Client) -> httpx.Response:
        return client.post("/v1/search", json={"ids": ["P00001"]})

    def lost_and_found(replica: IndexReplica) -> None:
        monkeypatch.setattr(serving, "index_calls", {"proteins": Call(replica.about, replica.run)})
        with serving.client() as client:
            os.truncate(part, 100)
            for body in ({"ids": ["P00001"]}, {"sequences": ["MKT"]}):
                answer = client.post("/v1/search", json=body)
                assert f"proteins: {part}: " in problem(answer, 503) and answer.headers["retry-after"] == "2"
            assert f"indexes: proteins: {part}: " in problem(client.get("/ready"), 503)
            assert client.post("/v1/encode", json={"sequences": ["MKT"]}).status_code == 200
            shutil.copyfile(serving.index / "parts" / part.name, part)
            eventually(lambda: searched(client).status_code == 200)
            assert found(searched(client)) == wanted and client.get("/ready").status_code == 200

    with serving.client() as client:
        wanted = found(searched(client))
    lost_and_found(IndexReplica(served, "esm", "1"))
    os.truncate(part, 0)
    # Serve restarts a replica after a crash; the first replica after a start or SIGHUP refuses instead.
    lost_and_found(IndexReplica(served, "esm", "1"))
    os.truncate(part, 0)
    kept.clear()
    with pytest.raises(DataError, match=r"00000\.safetensors: damaged"):
        IndexReplica(served, "esm", "2")
