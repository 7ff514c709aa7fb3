import csv
from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.embeddings.reader import read_embeddings
from tests.embeddings import make_embeddings, random_vectors

IDS = [f"p{n}" for n in range(200)]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_embeddings(tmp_path / "database", random_vectors(200, 8), IDS)
    make_embeddings(tmp_path / "queries", random_vectors(30, 8, seed=1), file_format="npy", dtype="fp16")
    return tmp_path


def hits(path: Path) -> list[tuple[str, int, str, float]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    assert header == ["query", "rank", "target", "score"]
    return [(query, int(rank), target, float(score)) for query, rank, target, score in rows]


def scores(queries: np.ndarray, database: np.ndarray, metric: str) -> np.ndarray:
    """Larger is nearer."""
    if metric == "l2":
        return -np.linalg.norm(queries[:, None] - database[None], axis=2)
    if metric == "cosine":
        queries, database = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (queries, database))
    return queries @ database.T


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_the_exact_hits_are_the_nearest_of_all(command, here, metric):
    outcome = command.done(
        "embed search database --search.queries queries --search.output h.tsv --search.top_k 3 --search.metric "
        f"{metric}"
    )
    queries = random_vectors(30, 8, seed=1).astype(np.float16).astype(np.float32)
    expected = scores(queries, random_vectors(200, 8), metric)
    found = hits(here / "h.tsv")
    best = np.argsort(-expected, axis=1)[:, :3]
    ranked = [(f"p{query}", rank, f"p{target}") for query in range(30) for rank, target in enumerate(best[query], 1)]
    assert [hit[:3] for hit in found] == ranked
    values = np.array([hit[3] for hit in found]) * (-1 if metric == "l2" else 1)
    np.testing.assert_allclose(values, np.take_along_axis(expected, best, axis=1).ravel(), atol=1e-4)
    assert "90 hits of 30 proteins searched in 200" in outcome.out


def test_without_queries_no_protein_finds_itself_and_a_small_database_has_fewer_hits(command, here):
    make_embeddings(here / "equal", np.ones((5, 4), dtype=np.float32))  # each is as near as itself
    make_embeddings(here / "small", random_vectors(3, 8))
    found = {}
    for database, number in {"database": 400, "equal": 10, "small": 6}.items():
        command.done(f"embed search {database} --search.output {database}.tsv --search.top_k 2")
        found[database] = hits(here / f"{database}.tsv")
        assert len(found[database]) == number
        assert all(query != target for query, _, target, _ in found[database])
    ivf = "--search.output ivf.tsv --search.top_k 2 --search.index ivf --search.ivf_lists 5 --search.ivf_probes 5"
    command.done(f"embed search database {ivf}")
    exact = [hit[:3] for hit in found["database"]]
    assert [hit[:3] for hit in hits(here / "ivf.tsv")] == exact, "all clusters are probed"


def test_mistakes_are_one_line(command, here):
    vectors = random_vectors(200, 8)
    vectors[150] = 0
    make_embeddings(here / "zero", vectors, IDS)
    make_embeddings(here / "narrow", random_vectors(9, 4))
    make_embeddings(here / "residues", random_vectors(9, 4), per="residue")
    vectors[150, 2] = np.nan
    make_embeddings(here / "nan", vectors, IDS)
    for arguments, code, words in [
        ("database --search.output h.tsv --search.queries narrow", 3, "narrow has 4 channels, database 8"),
        ("residues --search.output h.tsv", 3, "has values for each residue"),
        ("zero --search.output h.tsv", 3, "zero: 'p150' is a vector of zeros, which has no cosine, in mean"),
        ("nan --search.output h.tsv --search.metric l2", 3, "nan: 'p150' has NaN or infinity"),
        ("database --search.output h.tsv --search.index ivf --search.ivf_lists 201", 2, "ivf_lists 201: more"),
        ("database --search.output no/h.tsv", 2, "there is no folder no"),
    ]:
        command.refused(code, words, f"embed search {arguments}")
    assert not (here / "h.tsv").exists()
    command.done("embed search zero --search.output h.tsv --search.metric l2")


def test_vectors_meet_where_models_poolings_and_layers_are_the_same_joined_ones_too(command, here):
    outputs = {"mean": random_vectors(200, 8), "max": random_vectors(200, 8)}
    make_embeddings(here / "other", outputs, IDS, model="large")
    make_embeddings(here / "same", outputs, IDS)
    refused = (
        "error: other has vectors of model large (mean over residues), database of model small (mean over residues), "
        "which can't be compared; give embeddings of the same model, pooling and layer\n"
    )
    command.refused(3, refused, "embed search database --search.output h.tsv --search.queries other")
    command.done("embed search database --search.output h.tsv --search.queries same")
    for folder in ("x", "y"):
        make_embeddings(here / folder, {"mean": random_vectors(9, 3), "max": random_vectors(9, 3)})
        make_embeddings(here / f"{folder}b", random_vectors(9, 3), model="large")
    joins = {"xx": "x xb", "yy": "y yb", "yx": "yb y", "max": "x xb --join.names max mean", "deep": "xx yy"}
    for output, folders in joins.items():
        command.done(f"embed join --join.folders {folders} --join.output {output}")
    for queries, code in {"yy": 0, "yx": 3, "max": 3}.items():
        outcome = command(f"embed search xx --search.output {queries}.tsv --search.queries {queries}")
        assert (outcome.code, outcome.err.count("which can't be compared")) == (code, code // 3), outcome.err
    assert read_embeddings(here / "deep").manifest.space("joined").count("small | large") == 2
