"""Annotations, scores and weights from files."""

import logging
from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.function.annotations import (
    information_accretion,
    read_annotations,
    read_scores,
)
from esmeray.function.ontology import Ontology, read_ontology
from tests.function.test_ontology import HEADER, term

MF, BP = "molecular_function", "biological_process"


@pytest.fixture
def ontology(tmp_path) -> Ontology:
    """Four terms, the last below the two of the middle, and one of another aspect."""
    path = tmp_path / "terms.obo"
    diamond = term("GO:1") + term("GO:2", "is_a: GO:1", "alt_id: GO:22") + term("GO:3", "is_a: GO:1")
    path.write_text(HEADER + diamond + term("GO:4", "is_a: GO:2", "is_a: GO:3") + term("GO:9", namespace=BP))
    return read_ontology(path)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.tsv"
    path.write_text(text)
    return path


def gaf_row(protein: str, name: str, code: str = "IDA", relation: str = "enables", date: str = "20200101") -> str:
    row = ["UniProtKB", protein, "S", relation, name, "PMID:1", code, "", "F", "", "", "protein", "taxon:1", date, "X"]
    return "\t".join([*row, "", ""]) + "\n"


def test_annotations_have_all_ancestors_and_alternative_ids_are_their_terms(ontology, tmp_path):
    found = read_annotations(written(tmp_path, "B\tGO:4\nA\tGO:22\t0.5\nB\tGO:9\nB GO:2\n"), ontology)
    assert found[MF].proteins == ("B", "A")
    assert found[MF].terms.toarray().tolist() == [[True] * 4, [True, True, False, False]]
    assert found[BP].proteins == ("B",)
    assert found[MF].of(["X", "A"]).toarray().tolist() == [[False] * 4, [True, True, False, False]]


def test_gaf_is_taken_by_evidence_date_and_without_not(ontology, tmp_path):
    rows = gaf_row("A", "GO:2") + gaf_row("B", "GO:2", "IEA") + gaf_row("C", "GO:2", relation="NOT|enables")
    path = written(tmp_path, "!gaf-version: 2.2\n!x\n" + rows + gaf_row("D", "GO:3", date="20210601"))
    assert read_annotations(path, ontology)[MF].proteins == ("A", "D")
    assert read_annotations(path, ontology, evidence=["IEA"])[MF].proteins == ("B",)
    assert read_annotations(path, ontology, since="20210601")[MF].proteins == ("D",)
    assert read_annotations(path, ontology, before="20210601")[MF].proteins == ("A",)
    with pytest.raises(DataError, match="no annotation is left; check terms, evidence codes and dates"):
        read_annotations(path, ontology, evidence=["EXP"])


BAD_ANNOTATIONS = {
    "unknown term": ("A\tGO:1\nA\tGO:7\n", "line 2: the term 'GO:7' is not in the ontology, or obsolete"),
    "one column": ("A\tGO:1\nA\n", "line 2: 2 columns were expected, got 'A'"),
    "two aspects": ("A\tGO:1\nA\tGO:9\n", f"line 2: GO:9 is a term of {BP}, and only {MF} was asked for"),
    "GAF 2.1": ("!gaf-version: 2.1\n" + gaf_row("A", "GO:1"), "is GAF 2.1; 2.2 is read"),
    "GAF cut off": ("!gaf-version: 2.2\nUniProtKB\tA\n", "line 2: GAF 2.2 has 17 columns, got 2"),
    "empty": ("", "no annotation is left"),
}


@pytest.mark.parametrize("kind", BAD_ANNOTATIONS)
def test_bad_annotations_are_refused_with_their_line(ontology, tmp_path, kind):
    text, words = BAD_ANNOTATIONS[kind]
    with pytest.raises(DataError, match=rf"some.tsv.*{words}"):
        read_annotations(written(tmp_path, text), ontology, aspect=MF)


def test_scores_keep_the_largest_of_repeats_and_only_wanted_proteins(ontology, tmp_path, caplog):
    text = "AUTHOR x\nMODEL 1\nA\tGO:2\t0.3\nA\tGO:22\t0.7\nA\tGO:2\t0.5\nB\tGO:4\t1\nX\tGO:4\t1\nA\tGO:7\t1\nEND\n"
    path = written(tmp_path, text)
    with caplog.at_level(logging.WARNING):
        found = read_scores(path, ontology, {MF: ["B", "A"], BP: ["B"]}, unknown="ignore")
    assert set(found) == {MF}
    assert found[MF].toarray().tolist() == [[0, 0, 0, 1], [0, 0.7, 0, 0]]
    assert "2 lines with unknown terms or proteins ignored" in caplog.text


BAD_SCORES = {
    "A\tGO:1\t1.01": "the score '1.01' is not a number from 0 to 1",
    "A\tGO:1\tnan": "the score 'nan' is not",
    "A\tGO:1\thigh": "the score 'high' is not",
    "A\tGO:1": "3 columns were expected",
    "X\tGO:1\t0.5": "the protein 'X' has no annotation to evaluate it by",
    "A\tGO:7\t0.5": "the term 'GO:7' is not in the ontology",
    "A\tGO:9\t0.5": "GO:9 is a term of biological_process, and only molecular_function was asked for",
}


@pytest.mark.parametrize("line", BAD_SCORES)
def test_bad_scores_are_refused_with_their_line(ontology, tmp_path, line):
    with pytest.raises(DataError, match=f"some.tsv, line 1: {BAD_SCORES[line]}"):
        read_scores(written(tmp_path, line + "\n"), ontology, {MF: ["A"]}, aspect=MF)


def test_information_accretion_is_that_of_a_term_given_all_its_parents(ontology, tmp_path):
    text = "A\tGO:4\nB\tGO:2\nB\tGO:3\nC\tGO:2\nD\tGO:1\n"
    annotations = read_annotations(written(tmp_path, text), ontology)[MF]
    # of A, B, C, D and the one that has every term: 5 with GO:1, 4 with GO:2, 3 with GO:3, both of these 3, GO:4 2
    expected = [0, -np.log2(4 / 5), -np.log2(3 / 5), -np.log2(2 / 3)]
    for proteins in (1, 3, 4096):
        found = information_accretion(annotations, ontology.aspects[MF], proteins)
        assert found == pytest.approx(expected, abs=1e-12)
