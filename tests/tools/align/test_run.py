"""The command ``align``, which aligns queries with a store."""

from pathlib import Path

import pytest

from esmeray.common.command_line import INTERRUPTED
from tests.damage import killed_in_piece
from tests.embeddings import make_embeddings, random_vectors
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences

CLEAR = ["--align.evalue", "1e-9"]
KEEP_ALL = ["--align.evalue", "inf", "--align.hits", "3"]


@pytest.fixture
def files(command, tmp_path) -> list[object]:
    """Queries, and a store of the queries and other sequences."""
    sequences = random_sequences([120] * 30)
    names = [f"p{number}" for number in range(30)]
    fasta = write_proteins(tmp_path / "all.fasta", sequences, names)
    assert command("data", "convert", "--data.source", fasta, "--convert.store", tmp_path / "store").code == 0
    queries = write_proteins(tmp_path / "queries.fasta", sequences[:9], names[:9])
    return ["--align.queries", queries, "--align.store", tmp_path / "store"]


def rows(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_hits_are_written_by_query_and_the_file_is_replaced_when_asked(command, files, tmp_path):
    output = tmp_path / "done.tsv"
    outcome = command.done("align", *files, "--align.output", output, *CLEAR)
    assert f"{output}: 9 hits for 9 proteins against 30" in outcome.out
    assert outcome.out.endswith("\n  all records read unchanged\n")
    assert [row[:10] for row in rows(output)] == [
        [f"p{n}", f"p{n}", "100.000", "120", "0", "0", "1", "120", "1", "120"] for n in range(9)
    ]
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*.lock"))
    assert command("align", *files, "--align.output", output).code == 2
    whole = ["--align.queries", files[3], *files[2:], "--align.output", output, "--overwrite", *CLEAR]
    assert command("align", *whole).code == 0
    assert len(rows(output)) == 30


def test_prefilters_and_a_matrix_from_a_file_give_hits(command, files, tmp_path):
    letters = "ARNDCQEGHILKMFPSTWYVX"
    table = [" ".join(letters), *(f"{a} {' '.join('5' if a == b else '-4' for b in letters)}" for a in letters)]
    (tmp_path / "matrix").write_text("\n".join(table))
    own = ["--align.matrix", tmp_path / "matrix", "--align.gap_open", 10, "--align.gap_extend", 2]
    own += ["--align.evalue", "inf", "--align.hits", 1]
    make_embeddings(tmp_path / "vectors", random_vectors(30, 4), sequences=random_sequences([120] * 30))
    near = ["--align.embeddings", tmp_path / "vectors"]
    kmer = ["--align.prefilter", "kmer", *CLEAR]
    for name, options in ("kmer", kmer), ("near", ["--align.prefilter", "embedding", *near, *CLEAR]), ("own", own):
        output = tmp_path / f"{name}.tsv"
        command.done("align", *files, "--align.output", output, "--align.candidates", 5, *options)
        assert [row[1] for row in rows(output)] == [f"p{n}" for n in range(9)]
    assert {row[-1] for row in rows(tmp_path / "own.tsv")} == {"nan"}


def test_a_killed_search_resumes_and_writes_the_same_bytes(command, files, tmp_path):
    job = ["align", *files, *KEEP_ALL, "--align.output"]
    with killed_in_piece(4):
        assert command(*job, tmp_path / "killed.tsv").code == INTERRUPTED
    assert not (tmp_path / "killed.tsv").exists()
    command.refused(2, "another job (hits was", *job, tmp_path / "killed.tsv", "--align.hits", 4)
    for name in ("killed.tsv", "whole.tsv"):
        command.done(*job, tmp_path / name)
    assert (tmp_path / "killed.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()
    assert len(rows(tmp_path / "whole.tsv")) == 27


def test_what_cannot_be_aligned_is_refused_in_one_line(command, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, code, words in [
        ("--align.queries absent.fasta", 3, "absent.fasta"),
        ("--align.matrix BLOSUM61", 2, "did you mean BLOSUM62"),
        ("--align.gap_open 5", 2, "give --align.evalue inf"),
        ("--align.prefilter embedding", 2, "needs align.embeddings"),
        ("--align.embeddings x", 2, "needs align.embeddings"),
        ("--align.prefilter embedding --align.embeddings store", 3, "no embeddings found"),
        ("--align.device cuda --align.prefilter kmer", 2, "--align.prefilter none"),
        ("--align.store .", 3, "not a store"),
    ]:
        required = "--align.queries queries.fasta --align.store store --align.output hits.tsv"
        command.refused(code, words, f"align {required} {options}")
    assert not list(tmp_path.glob("*.tsv*"))
