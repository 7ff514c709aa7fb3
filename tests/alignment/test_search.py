"""Hits of a search: exact scores, alignments with these scores, and prefilters that find the right records."""

import gzip
import os
from pathlib import Path

import numpy as np
import parasail
import pytest

from esmeray.alignment.scoring import Scoring, scoring
from esmeray.alignment.search import EmbeddingNeighbours, Search, SharedWords
from esmeray.common import compiled_code
from esmeray.common.errors import DataError
from esmeray.dataset.store.reader import Store
from tests.dataset.stores import make_store
from tests.embeddings import make_embeddings, random_vectors
from tests.model.support import random_sequences

PROTEINS = int(os.environ.get("ESMERAY_ALIGNED", "60"))
"""Number of real proteins that are aligned all against all."""


def store_of(folder: Path, sequences: list[str]) -> Store:
    folder.mkdir(exist_ok=True)
    return Store(make_store(folder, [(f"p{number}", text) for number, text in enumerate(sequences)]))


@pytest.fixture(scope="module")
def sequences() -> list[str]:
    """Families of four: a random protein and three copies with increasingly many substitutions and a deletion."""
    made = []
    for seed in range(12):
        first, other = random_sequences([150 + 10 * seed] * 2, seed=seed)
        made.append(first)
        for share in (5, 3, 2):
            changed = "".join(b if n % share == 1 else a for n, (a, b) in enumerate(zip(first, other, strict=True)))
            made.append(changed[:60] + changed[60 + share :])
    return [*made, "MXXXUBZOK" * 8, "W", "X" * 30]


@pytest.fixture(scope="module")
def store(sequences, tmp_path_factory) -> Store:
    return store_of(tmp_path_factory.mktemp("search"), sequences)


def score_of(query: str, target: str, trace: np.ndarray, by: Scoring) -> int:
    """Compute the score of an alignment from its columns; check that it starts and ends with an aligned pair."""
    total, gap = 0, None
    for column in trace.tolist():
        side = column.index(-1) if -1 in column else None
        if side is None:
            a, b = (by.codes[ord(text[index])] for text, index in zip((query, target), column, strict=True))
            total += int(by.scores[a, b])
        else:
            total -= by.gap_extend + (by.gap_open if side != gap else 0)
        gap = side
    for positions in trace.T:
        assert (np.diff(positions[positions >= 0]) == 1).all()
    assert (trace[[0, -1]] >= 0).all()
    return total


@pytest.mark.parametrize("by", [scoring(), scoring("BLOSUM45"), scoring("PAM250", 4, 4)], ids=lambda by: by.name)
def test_alignments_have_the_score_that_is_reported(store, sequences, by):
    search = Search(store, by)
    for query in sequences[::5]:
        for hit in search.hits(query.encode(), 8, np.inf):
            trace, *_ = search.alignment(query.encode(), hit)
            assert score_of(query, sequences[hit.record], trace, by) == hit.score


def test_scores_of_all_pairs_of_real_proteins_are_those_of_parasail(shared_data, tmp_path):
    with gzip.open(shared_data / "uniref90_10k.fasta.gz", "rt") as file:
        texts = ["".join(record.split("\n")[1:]) for record in file.read().split(">")[1 : PROTEINS + 1]]
    search = Search(store_of(tmp_path, texts), scoring())
    plain = [text.replace("U", "C").replace("O", "X") for text in texts]
    for query, known in zip(texts, plain, strict=True):
        expected = [parasail.sw_scan_32(known, target, 12, 1, parasail.blosum62).score for target in plain]
        assert search.scores(query.encode()).tolist() == expected


def test_hits_are_sorted_by_score_then_record_also_without_a_compiler(tmp_path, monkeypatch):
    first, other = random_sequences([80, 80], seed=5)
    search = Search(store_of(tmp_path, [other, first, first[:60], first, first]), scoring())
    assert [hit.record for hit in search.hits(first.encode(), 2)] == [1, 3]
    hits = search.hits(first.encode(), 4)
    assert [hit.record for hit in hits] == [1, 3, 4, 2]
    assert search.hits(first.encode(), 4, 1e-9, np.array([0, 2])) == hits[3:]
    monkeypatch.setattr(compiled_code, "load", lambda *_, **__: None)
    assert search.hits(first.lower().encode(), 4) == hits


def test_a_query_of_one_residue_and_one_without_a_hit(store):
    search = Search(store, scoring())
    assert search.hits(b"W", 3) == []  # such scores are expected by chance
    assert {hit.score for hit in search.hits(b"W", 3, np.inf)} == {11}
    assert search.hits(b"X" * 50, 3, np.inf) == [] and search.hits(b"", 3, np.inf) == []
    row = search.row("q", b"W", search.hits(b"W", 1, np.inf)[0])
    assert "\t100.000\t1\t0\t0\t1\t1\t" in row
    (hit,) = Search(store, scoring("BLOSUM62", 5, 5)).hits(b"W", 1, 0)  # no limit without constants
    assert np.isnan([hit.bits, hit.evalue]).all()


def test_a_long_query_is_traced_beyond_16_bits(tmp_path):
    query = random_sequences([7000])[0]
    target = query[:30] + query[34:60] + "W" + query[61:]
    assert query[60] != "W"
    search = Search(store_of(tmp_path, ["MKV" + target, query[500:800]]), scoring())
    whole, inner = search.hits(query.encode(), 2)
    assert whole.score > 2**15 > inner.score
    assert "\t100.000\t300\t0\t0\t501\t800\t1\t300\t" in search.row("q", query.encode(), inner)
    row = search.row("q", query.encode(), whole).split("\t")
    assert row[:10] == ["q", "p0", f"{100 * 6995 / 7000:.3f}", "7000", "1", "1", "1", "7000", "4", "6999"]
    assert float(row[10]) == pytest.approx(whole.evalue, rel=0.01) and row[11] == f"{whole.bits:.1f}"


def test_words_that_are_shared_name_the_family(store, sequences):
    words = SharedWords(store)
    for number in range(0, 48, 4):
        named = words("", sequences[number].encode(), 6)
        assert {number, number + 1} <= set(named.tolist()) and (np.diff(named) > 0).all()
    assert [len(words("", query, 5)) for query in (b"", b"MK", b"XXXXX")] == [5, 5, 5]
    assert SharedWords(store, np.array([1, 2, 30]))("", sequences[0].encode(), 1).tolist() == [1]


def test_neighbours_by_embeddings_are_those_of_the_largest_cosine(tmp_path):
    sequences = random_sequences([30] * 40)
    store = store_of(tmp_path, sequences)
    vectors = random_vectors(40, 6)
    make_embeddings(tmp_path / "vectors", vectors, sequences=sequences)
    make_embeddings(tmp_path / "fewer", vectors[:39], sequences=sequences[:39])
    make_embeddings(tmp_path / "longer", vectors, sequences=[*sequences[:39], "M" * 31])
    make_embeddings(tmp_path / "other", vectors, sequences=sequences, model="large")
    near = EmbeddingNeighbours(store, tmp_path / "vectors", tmp_path / "vectors")
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for number in range(0, 40, 7):
        expected = np.argsort(-(units @ units[number]))[:5]
        assert near(store.id(number), sequences[number].encode(), 5).tolist() == sorted(expected.tolist())
    for query, words in (
        ("other", "no vector for query 'other'"),
        ("p3", r"vectors: 'p3' has a different sequence in align\.queries"),
    ):
        with pytest.raises(DataError, match=words):
            near(query, b"M" * 29, 5)
    refused = {
        ("fewer", "fewer"): "or their order differ from",
        ("longer", "longer"): "'p39' has a different sequence in",
        ("vectors", "other"): r"vectors of model large .* of model small",
    }
    for (records, queries), words in refused.items():
        with pytest.raises(DataError, match=words):
            EmbeddingNeighbours(store, tmp_path / records, tmp_path / queries)
