"""Annotations, scores and weights are read from files."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError, DataError
from esmeray.function.annotations import (
    Annotations,
    information_accretion,
    read_annotations,
    read_scores,
)
from esmeray.function.ontology import Ontology, read_ontology
from tests.function.test_ontology import HEADER, term

MF, BP = "molecular_function", "biological_process"


def diamond(folder: Path) -> Ontology:
    """Four terms in a diamond (the last has two parents), and one term of another aspect."""
    path = folder / "terms.obo"
    middle = term("GO:1") + term("GO:2", "is_a: GO:1", "alt_id: GO:22") + term("GO:3", "is_a: GO:1")
    path.write_text(HEADER + middle + term("GO:4", "is_a: GO:2", "is_a: GO:3") + term("GO:9", namespace=BP))
    return read_ontology(path)


@pytest.fixture
def ontology(tmp_path) -> Ontology:
    return diamond(tmp_path)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.tsv"
    path.write_text(text)
    return path


def gaf_row(protein: str, name: str, code: str = "IDA", relation: str = "enables", date: str = "20200101") -> str:
    row = ["UniProtKB", protein, "S", relation, name, "PMID:1", code, "", "F", "", "", "protein", "taxon:1", date, "X"]
    return "\t".join([*row, "", ""]) + "\n"


def test_annotations_have_all_ancestors(ontology, tmp_path):
    found = read_annotations(written(tmp_path, "B\tGO:4\nA\tGO:22\t1.0\nB\tGO:9\nB GO:2\n"), ontology)
    assert found[MF].proteins == ("B", "A")
    assert found[MF].terms.toarray().tolist() == [[True] * 4, [True, True, False, False]]
    assert found[BP].proteins == ("B",)
    assert found[MF].of(["X", "A"]).toarray().tolist() == [[False] * 4, [True, True, False, False]]


def test_gaf_is_taken_by_evidence_date_and_without_not(ontology, tmp_path):
    rows = gaf_row("A", "GO:2") + gaf_row("B", "GO:2", "IEA") + gaf_row("C", "GO:2", relation="NOT|enables")
    path = written(tmp_path, "!gaf-version: 2.2\n!x\n" + rows + gaf_row("D", "GO:3", date="2021-06-01"))
    for options, proteins in (
        ({}, ("A", "D")),
        ({"evidence": ["IEA"]}, ("B",)),
        ({"since": "20210601"}, ("D",)),
        ({"before": "20210601"}, ("A",)),
    ):
        assert read_annotations(path, ontology, **options)[MF].proteins == proteins
    with pytest.raises(DataError, match="no annotations left; check terms, evidence codes and dates"):
        read_annotations(path, ontology, evidence=["EXP"])


BAD_ANNOTATIONS = {
    "unknown term": ("A\tGO:1\nA\tGO:7\n", "line 2: the term 'GO:7' is obsolete or not in the ontology"),
    "one column": ("A\tGO:1\nA\n", "line 2: expected 2 columns, found 'A'"),
    "no id": ("A\tGO:1\n\tGO:1\n", "line 2: expected 2 columns, found"),
    "a missing id": ("A\tGO:1\nnan\tGO:1\n", "line 2: expected 2 columns, found 'nan GO:1'"),
    "two aspects": ("A\tGO:1\nA\tGO:9\n", f"line 2: GO:9 belongs to {BP}, but only {MF} was requested"),
    "GAF 3": (
        "!gaf-version: 3.0\n" + gaf_row("A", "GO:1"),
        r"is GAF in an unsupported version \('!gaf-version: 3.0'\)",
    ),
    "GAF cut off": ("!gaf-version: 2.2\nUniProtKB\tA\n", "line 2: expected the 17 columns of GAF, found 2"),
    "GPAD 1.1": (
        "!gpa-version: 1.1\nUniProtKB\tA\n",
        r"is GPAD \('!gpa-version: 1.1'\); download the same annotations as GAF",
    ),
    "GPAD 2.0": (
        "! gpad-version: 2.0\nUniProtKB:A\n",
        r"is GPAD \('! gpad-version: 2.0'\); download the same annotations as GAF",
    ),
    "GPI": ("!gpi-version: 2.1\nUniProtKB:A\n", "is GPI .*; download the same annotations as GAF"),
    "GPAD without the record has no": (
        "UniProtKB\tA\tenables\tGO:1\tPMID:1\tECO:0000353\t\t\t2020\tX\t\t\n",
        "is GPAD .*; download the",
    ),
    "other evidence code": (
        "!gaf-version: 2.2\n" + gaf_row("A", "GO:1", "XYZ"),
        "line 2: 'XYZ' is not a term, aspect, evi",
    ),
    "unknown term in line 1": ("A\tGO:7\nA\tGO:1\n", "line 1: the term 'GO:7' is obsolete or not in the ontology"),
    "unknown term after a known one": ("A\tGO:1\tGO:7\n", "line 1: the term 'GO:7' is obsolete or not in the ontology"),
    "a word after a term": ("A\tGO:1\tmembrane\n", "line 1: 'membrane' is not a term, aspect, evidence code or sc"),
    "a predicted term": ("A\tGO:1\t0.9\n", "line 1: '0.9' is not a term, aspect, evidence code or score of 1"),
    "an absent term": ("A\tGO:1\t0\n", "line 1: '0' is not a term, aspect, evidence code or score of 1"),
    "empty": ("", "no annotations left"),
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
    assert "some.tsv: left out: lines for other proteins: 1, unknown terms: 1" in caplog.text


BAD_SCORES = {
    "A\tGO:1\t1.01": "the score '1.01' is not a number from 0 to 1",
    "A\tGO:1\tnan": "the score 'nan' is not",
    "A\tGO:1\thigh": "the score 'high' is not",
    "A\tGO:1": "expected 3 columns, found",
    "A\tGO:1\t0.5\tGO:2": "expected 3 columns, found 'A GO:1 0.5 GO:2'",
    "A\tGO:1;GO:2\t0.5": "expected 3 columns, found 'A GO:1 GO:2 0.5'",
    "A\tGO:7\t0.5": "the term 'GO:7' is obsolete or not in the ontology",
    "A\tGO:9\t0.5": "GO:9 belongs to biological_process, but only molecular_function was requested",
}


@pytest.mark.parametrize("line", BAD_SCORES)
def test_bad_scores_are_refused_with_their_line(ontology, tmp_path, line):
    with pytest.raises(DataError, match=f"some.tsv, line 1: {BAD_SCORES[line]}"):
        read_scores(written(tmp_path, line + "\n"), ontology, {MF: ["A"]}, aspect=MF)


def test_an_id_that_is_no_annotated_protein_is_refused_with_its_line(ontology, tmp_path):
    path = written(tmp_path, "A\tGO:1\t0.5\nX\tGO:1\t0.5\n")
    with pytest.raises(DataError, match=r"some.tsv, line 2: the protein 'X' has no annotation to evaluate against"):
        read_scores(path, ontology, {MF: ["A"]})
    with pytest.raises(
        DataError, match=r"some.tsv: only 0 of 2 ids match the annotated proteins: 'A', 'X' compared with"
    ):
        read_scores(path, ontology, {MF: ["B", "C", "D"]})


FORMS = {
    "words": ("{0} {1}", " ", ""),
    "CSV": ("{0},{1}", ";", ""),
    "CSV with quotes": ('"{0}","{1}"', ", ", "Entry,term\n"),
    "lists of Python": ("{0}\t['{1}']", "', '", ""),
    "lists of JSON": ('{0}\t["{1}"]', '","', "Entry\tterms\n"),
    "UniProt's table": ("{0}\t{1}", "; ", "Entry\tGene Ontology IDs\n"),
    "CAFA's table": ("{0}\t{1}\tF", "\t", "EntryID\tterm\taspect\n"),
    "scores": ("{0}\t{1}\t1.00", "|", "AUTHOR a\nMODEL 1\n"),
    "evidence": ("{0}\t{1}\tIDA\tMFO\n\n# a comment", ",", "#protein\tterm\tevidence\n"),
}


@given(
    st.dictionaries(
        st.sampled_from(["P00001", "sp|P00002|B_HUMAN", "tr|A0A024R161|C", "P00004-2", "NP_000509.1"]),
        st.lists(st.sampled_from(["GO:1", "GO:2", "GO:3", "GO:4", "GO:22"]), min_size=1, max_size=4),
        min_size=1,
    ),
    st.sampled_from([*FORMS]),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_every_term_of_every_line_is_read_whatever_the_separators(
    tmp_path_factory, terms_of, form, is_gzip, line_break
):
    folder = tmp_path_factory.getbasetemp()
    ontology = diamond(folder)
    line, separator, header = FORMS[form]
    lines = [line.format(protein, separator.join(terms)) for protein, terms in terms_of.items()]
    content = (header + "\n".join(lines)).replace("\n", line_break).encode()
    path = folder / ("forms.gz" if is_gzip else "forms")
    path.write_bytes(gzip.compress(content) if is_gzip else content)
    aspect, annotations = ontology.aspects[MF], read_annotations(path, ontology)[MF]
    assert annotations.proteins == tuple(terms_of)
    for row, terms in zip(annotations.terms.toarray(), terms_of.values(), strict=True):
        columns = [ontology.positions[term][1] for term in terms]
        assert (row == aspect.ancestors.toarray()[columns].any(axis=0)).all()


@given(
    version=st.sampled_from(
        ["!gaf-version: 1.0\n", "!gaf-version: 2.0\n", "! GAF-version: 2.1\n! x\n", "!gaf-version: 2.2\n", "# x\n", ""]
    ),
    spelling=st.sampled_from(["NOT", "not|enables", "NOT | involved_in", " Not ", "contributes_to|NOT", "NOT|"]),
    plain=st.sampled_from(["", "enables", "involved_in|contributes_to", "acts_upstream_of_or_within", "is_nothing"]),
)
def test_every_gaf_is_read_and_every_not_is_left_out(tmp_path_factory, version, spelling, plain):
    folder = tmp_path_factory.getbasetemp()
    rows = gaf_row("A", "GO:2", relation=plain) + "! comment\n" + gaf_row("B", "GO:2", relation=spelling)
    assert read_annotations(written(folder, version + rows), diamond(folder))[MF].proteins == ("A",)


def test_what_is_left_out_is_counted_by_reason(ontology, tmp_path, caplog):
    rows = gaf_row("A", "GO:2") + gaf_row("B", "GO:2", "IEA") * 2 + gaf_row("C", "GO:2", relation="NOT")
    read_annotations(written(tmp_path, "!gaf-version: 2.1\n" + rows), ontology)
    assert "some.tsv: left out: annotations with other evidence codes: 2, annotations with NOT: 1" in caplog.text
    text = "P1\tGO:1\tIEA\nP2\tGO:1\tEXP\nP3\t\nP4\tNOT|enables\tGO:1\nP2\tGO:7\n"
    assert read_annotations(written(tmp_path, text), ontology, unknown="ignore")[MF].proteins == ("P2",)
    assert (
        "with other evidence codes: 1, lines without terms: 1, annotations with NOT: 1, unknown terms: 1" in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("path", None), ("ontology", None), ("before", None), ("since", "2020-01-01")),
        *(("proteins", "P00001"), ("evidence", "IDA"), ("unknown", "skip")),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_its_name(ontology, tmp_path, name, value):
    arguments = {"path": written(tmp_path, "A\tGO:1\n"), "ontology": ontology} | {name: value}
    with pytest.raises(ConfigError, match=f"^{name}: .*, got {value!r}"):
        read_annotations(**arguments)


SPELLINGS = ("{}", "sp|{}|NAME_HUMAN", "tr|{}|{}_9BACT", "{}.2", "{}-2", "UniProtKB:{}")


@given(st.lists(st.sampled_from(SPELLINGS), min_size=4, max_size=4), st.sampled_from(SPELLINGS))
def test_scores_and_annotations_are_joined_whatever_the_spelling(tmp_path_factory, spellings, other):
    folder = tmp_path_factory.getbasetemp()
    ontology = diamond(folder)
    names = [f"P0000{number}" for number in range(4)]
    truth = [spelling.format(name, name) for spelling, name in zip(spellings, names, strict=True)]
    scored = "".join(f"{other.format(name, name)}\tGO:2\t0.{number + 1}\n" for number, name in enumerate(names))
    scores = read_scores(written(folder, scored), ontology, {MF: truth})[MF].toarray()
    assert scores[:, 1].tolist() == [0.1, 0.2, 0.3, 0.4]
    annotated = "".join(f"{other.format(name, name)}\tGO:2\n" for name in names)
    for found in (
        read_annotations(written(folder, annotated), ontology, proteins=truth)[MF],
        Annotations(tuple(truth), read_annotations(written(folder, annotated), ontology)[MF].of(truth)),
    ):
        assert found.proteins == tuple(truth)
        assert found.terms.toarray()[:, :2].all()


def test_scores_of_an_isoform_leave_those_of_the_protein_itself(ontology, tmp_path):
    path = written(tmp_path, "P00001-2\tGO:2\t0.9\nsp|P00001|A\tGO:2\t0.1\n")
    assert read_scores(path, ontology, {MF: ["P00001"]}, unknown="ignore")[MF].toarray()[0, 1] == 0.1
    path = written(tmp_path, "P00001-2\tGO:2\t0.9\nP00001-3\tGO:2\t0.1\n")
    with pytest.raises(DataError, match="ids 'P00001-2' and 'P00001-3' match 'P00001' of the annotated proteins"):
        read_scores(path, ontology, {MF: ["P00001"]})


@pytest.mark.parametrize(
    ("text", "sequences", "proteins"),
    [
        ("P00001-2\tGO:2\nP00001-3\tGO:3\nP00009\tGO:1\n", ["sp|P00001|A"], ("sp|P00001|A",)),
        ("P00001\tGO:2\nsp|P00001|A\tGO:3\nP00001-2\tGO:1\n", None, ("P00001", "P00001-2")),
    ],
)
def test_spellings_and_isoforms_of_a_protein_share_its_annotations(ontology, tmp_path, text, sequences, proteins):
    annotations = read_annotations(written(tmp_path, text), ontology, proteins=sequences)[MF]
    assert annotations.proteins == proteins
    assert annotations.terms.toarray()[0].tolist() == [True, True, True, False]


def test_information_accretion_is_that_of_a_term_given_all_its_parents(ontology, tmp_path):
    text = "A\tGO:4\nB\tGO:2\nB\tGO:3\nC\tGO:2\nD\tGO:1\n"
    annotations = read_annotations(written(tmp_path, text), ontology)[MF]
    # of A, B, C, D and the one that has every term: 5 with GO:1, 4 with GO:2, 3 with GO:3, both of these 3, GO:4 2
    expected = [0, -np.log2(4 / 5), -np.log2(3 / 5), -np.log2(2 / 3)]
    for proteins in (1, 3, 4096):
        found = information_accretion(annotations, ontology.aspects[MF], proteins)
        assert found == pytest.approx(expected, abs=1e-12)
