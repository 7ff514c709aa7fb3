import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.embeddings.reader import open_vectors, read_embeddings
from esmeray.inference.index.build import memory_index
from tests.embeddings import make_embeddings, random_vectors
from tests.inference.embedding.jobs import small_model_folder, write_proteins
from tests.model.support import random_sequences

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


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_hits_without_an_index_are_those_of_an_exact_one(command, here, metric):
    search = "embed search database --search.queries queries --search.output h.tsv --search.top_k 3 --search.metric"
    assert "90 hits for 30 proteins against 200" in command.done(f"{search} {metric}").out
    rows, scores = memory_index(open_vectors(here / "database"), metric).search(read_embeddings("queries")[:], 3)
    found = hits(here / "h.tsv")
    ranked = [(f"p{query}", rank + 1, f"p{row}") for (query, rank), row in np.ndenumerate(rows)]
    assert [hit[:3] for hit in found] == ranked
    np.testing.assert_allclose([hit[3] for hit in found], scores.ravel(), rtol=1e-5)  # scores have six digits


def test_without_queries_no_protein_finds_itself(command, here):
    make_embeddings(here / "equal", np.ones((5, 4), dtype=np.float32))  # all vectors are tied
    make_embeddings(here / "small", random_vectors(3, 8))
    found = {}
    for database, number in {"database": 400, "equal": 10, "small": 6}.items():
        command.done(f"embed search {database} --search.output {database}.tsv --search.top_k 2")
        found[database] = hits(here / f"{database}.tsv")
        assert len(found[database]) == number
        assert all(query != target for query, _, target, _ in found[database])


def test_an_index_gives_the_hits_of_the_folder_and_is_searched_in_itself(command, here):
    command.done("embed search database --search.output folder.tsv --search.queries queries")
    command.done("embed search database --search.output own.tsv --search.top_k 3")
    outcome = command.done("embed index database --index.output exact.index")
    assert "exact.index: 200 vectors added; 200 vectors with 8 channels (exact, cosine, 1 part)" in outcome.out
    compressed = "embed index database --index.output small.index --index.kind compressed"
    command.done(compressed)
    for index, probes in ("exact", ""), ("small", " --search.probes 4"):
        command.done(f"embed search {index}.index --search.output {index}.tsv --search.queries queries{probes}")
        command.done(f"embed search {index}.index --search.output {index}_own.tsv --search.top_k 3{probes}")
    assert (here / "exact.tsv").read_text() == (here / "folder.tsv").read_text()
    assert (here / "exact_own.tsv").read_text() == (here / "own.tsv").read_text()
    # All lists are probed, and 100 of 200 rows are scored again; int8 rounds.
    for name, exact in ("small", "folder"), ("small_own", "own"):
        pairs = [{(hit[0], hit[2]) for hit in hits(here / f"{file}.tsv")} for file in (name, exact)]
        assert len(pairs[0] & pairs[1]) > 0.95 * len(pairs[1])
    command.refused(2, "--search.metric l2", "embed search exact.index --search.output h.tsv --search.metric l2")
    command.refused(
        2, "index without clusters to probe", "embed search exact.index --search.output h.tsv --search.probes 2"
    )


def test_an_index_with_vectors_as_queries_needs_no_transformers(command, here):
    command.done("embed index database --index.output i --index.kind compressed")
    program = (
        "import sys; from esmeray.tools.__main__ import main; "
        "sys.exit(main(sys.argv[1:]) or len({'torch', 'transformers'} & sys.modules.keys()))"
    )
    words = ["embed", "search", "i", "--search.queries", "queries", "--search.output", "h.tsv"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sequences_are_embedded_by_the_model_of_the_index(command, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path_factory.mktemp("no-cluster")))  # ignore clusters on this machine
    monkeypatch.chdir(tmp_path)
    small_model_folder(tmp_path / "model")
    sequences = random_sequences([30, 9, 44, 17, 21])
    write_proteins(tmp_path / "proteins.fasta", sequences)
    write_proteins(tmp_path / "queries.fasta", sequences[1:3], ["q1", "q2"])
    job = "--embed.models model --embed.input proteins.fasta --embed.output vectors --embed.device cpu"
    command.done(f"embed run {job}")
    command.done("embed index vectors --index.output proteins.index")
    command.done("embed search proteins.index --search.queries queries.fasta --search.output hits.tsv --search.top_k 1")
    assert [hit[:3] for hit in hits(tmp_path / "hits.tsv")] == [("q1", 1, "P00001"), ("q2", 1, "P00002")]
    assert hits(tmp_path / "hits.tsv")[0][3] == pytest.approx(1, abs=1e-3)
    make_embeddings(tmp_path / "foreign", random_vectors(5, 32))
    command.done("embed index foreign --index.output foreign.index")
    search = "embed search foreign.index --search.queries queries.fasta --search.output h.tsv"
    command.refused(2, "does not record its model", search)
    command.refused(3, "are not comparable", f"{search} --search.model model")


def test_mistakes_are_one_line(command, here):
    vectors = random_vectors(200, 8)
    vectors[150] = 0
    make_embeddings(here / "zero", vectors, IDS)
    make_embeddings(here / "narrow", random_vectors(9, 4))
    make_embeddings(here / "residues", random_vectors(9, 4), per="residue")
    vectors[150, 2] = np.nan
    make_embeddings(here / "nan", vectors, IDS)
    for arguments, code, words in [
        ("database --search.output h.tsv --search.queries narrow", 3, "narrow has 4 channels, but database has 8"),
        ("residues --search.output h.tsv", 3, "has values per residue"),
        ("zero --search.output h.tsv", 3, "zero: 'p150' is a vector of zeros, which has no cosine, in mean"),
        ("nan --search.output h.tsv --search.metric l2", 3, "nan: 'p150' has NaN or infinity"),
        ("database --search.output h.tsv --search.probes 3", 2, "--search.probes: embeddings are searched exactly"),
        ("database --search.output no/h.tsv", 2, "folder no"),
    ]:
        command.refused(code, words, f"embed search {arguments}")
    assert not (here / "h.tsv").exists()
    command.done("embed search zero --search.output h.tsv --search.metric l2")


def test_vectors_of_other_models_or_layers_are_not_compared(command, here):
    outputs = {"mean": random_vectors(200, 8), "max": random_vectors(200, 8)}
    make_embeddings(here / "other", outputs, IDS, model="large")
    make_embeddings(here / "same", outputs, IDS)
    refused = (
        "error: other has vectors of model large (mean over residues), but database of model small (mean over "
        "residues), which are not comparable; give embeddings of the same model, pooling and layer\n"
    )
    command.refused(3, refused, "embed search database --search.output h.tsv --search.queries other")
    command.done("embed search database --search.output h.tsv --search.queries same")
    joins = {"joined": "same other", "alike": "same other", "swapped": "other same"}
    for output, folders in joins.items():
        command.done(f"embed join --join.folders {folders} --join.output {output}")
    command.done("embed search joined --search.output alike.tsv --search.queries alike")
    words = "embed search joined --search.output swapped.tsv --search.queries swapped"
    command.refused(3, "which are not comparable", words)
