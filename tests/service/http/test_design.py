"""Designs over HTTP equal the designs of design generate. What does not fit is refused in one line."""

import io
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from esmeray.inference.design.calls import design
from tests.service.serving import LIMITS, Serving, problem
from tests.structures import folds, pdb_lines

STRUCTURE = "\n".join([*pdb_lines(folds(1)[0]), *pdb_lines(folds(1, seed=1)[0], chain="B"), "END"])


def test_designs_are_those_of_the_command_in_any_batch(client: httpx.Client, serving: Serving, tmp_path: Path):
    path = tmp_path / "structure.pdb"
    path.write_text(STRUCTURE)
    settings = {"number": 3, "fix": "2-5", "omit": "CW", "temperature": 0.7, "seed": 4, "chains": "A"}
    wanted = design(serving.folder / "folds", path, **settings)
    body = {"model": "folds", "structure": STRUCTURE, **settings}
    single = client.post("/v1/design", json={**body, "number": 1}).json()
    answer = client.post("/v1/design", json=body).json()
    columns = ["id", "structure", "sequence", "score", "recovery"]
    assert answer["data"] == wanted[columns].to_dict("records") and single["data"] == answer["data"][:1]
    table = pq.read_table(
        io.BytesIO(client.post("/v1/design", json=body, headers={"Accept": "application/vnd.apache.parquet"}).content)
    )
    assert table.to_pylist() == answer["data"]


@pytest.mark.parametrize(
    ("changes", "status", "detail"),
    [
        ({"structure": "ATOM"}, 422, "structure: "),
        ({"fix": "A:900", "chains": "complex"}, 422, "fix A:900: structure has residues"),
        ({"tie": "A,B", "chains": "complex"}, 422, "tie A,B: name two or more chains"),
        ({"chains": "Z"}, 422, "structure: has no protein chain Z; it has A, B"),
        ({"omit": "B"}, 422, "omit: String should match pattern"),
        ({"number": LIMITS["sequences"] // 2 + 1}, 413, "52 sequences, more than 50"),
        ({"number": 20, "chains": "A"}, 413, "residues, more than 2,000"),
        ({"model": "esm"}, 422, "model esm has no designs"),
        ({"temperature": -1}, 422, "temperature: "),
    ],
)
def test_what_does_not_fit_is_refused(client: httpx.Client, changes: dict, status: int, detail: str):
    answer = client.post("/v1/design", json={"model": "folds", "structure": STRUCTURE, **changes})
    assert detail in problem(answer, status)
    assert "/" not in problem(answer, status), "no path of a temporary file"


def test_a_model_that_designs_has_no_other_endpoint(client: httpx.Client):
    for path in ("/v1/encode", "/v1/masked", "/v1/classify", "/v1/tokenize"):
        problem(client.post(path, json={"model": "folds", "sequences": ["MKT"]}), 422)
