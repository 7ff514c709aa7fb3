"""OBO files are read into arrays, or refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.function.ontology import Ontology, read_ontology

HEADER = "format-version: 1.2\ndefault-namespace: gene_ontology\n\n"


def term(name: str, *lines: str, namespace: str = "molecular_function") -> str:
    return "\n".join(["[Term]", f"id: {name}", f"name: {name}", f"namespace: {namespace}", *lines]) + "\n\n"


def read(tmp_path: Path, text: str) -> Ontology:
    path = tmp_path / "terms.obo"
    path.write_text(HEADER + text)
    return read_ontology(path)


def test_relations_inside_a_namespace_are_kept_and_all_else_is_left_out(tmp_path):
    ontology = read(
        tmp_path,
        term("GO:4", "is_a: GO:2 {source=x} ! two", "is_a: GO:2 ! twice", "relationship: part_of GO:3 ! three")
        + term("GO:2", "is_a: GO:1", "alt_id: GO:20", "relationship: regulates GO:3")
        + term("GO:3", "is_a: GO:1", "is_a: GO:8 ! obsolete", "relationship: part_of GO:9 ! of another namespace")
        + term("GO:1")
        + term("GO:8", "is_obsolete: true")
        + term("GO:9", namespace="biological_process")
        + "[Typedef]\nid: part_of\nname: part of\nnamespace: external\n",
    )
    assert set(ontology.aspects) == {"molecular_function", "biological_process"}
    aspect = ontology.aspects["molecular_function"]
    assert aspect.terms == ("GO:1", "GO:2", "GO:3", "GO:4")
    assert aspect.levels.tolist() == [0, 1, 1, 2]
    assert aspect.parents.toarray().tolist() == np.array([[0] * 4, [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]]).tolist()
    with pytest.raises(DataError, match=r"did you mean molecular_function\?"):
        ontology.aspect("molecular_functions")
    assert ontology.positions["GO:20"] == ontology.positions["GO:2"] == ("molecular_function", 1)
    assert "GO:8" not in ontology.positions


def test_a_term_that_is_written_twice_alike_is_one(tmp_path):
    ontology = read(tmp_path, GOOD + term("GO:2", "is_a: GO:1 ! one", "subset: another"))
    assert ontology.aspects["molecular_function"].terms == ("GO:1", "GO:2")


GOOD = term("GO:1") + term("GO:2", "is_a: GO:1")
REFUSED = {
    "cyclic": (term("GO:1", "is_a: GO:2") + term("GO:2", "is_a: GO:1"), "form a cycle: GO:"),
    "a term its own parent": (GOOD + term("GO:3", "is_a: GO:3"), "form a cycle: GO:3 to GO:3"),
    "cut inside a key": (GOOD + "[Term]\nid: GO:3\nnamespa", "line 17: 'namespa' is not a 'key: value'"),
    "cut inside a stanza's name": (GOOD + "[Ter", "line 15: '[Ter' is not a 'key: value'"),
    "cut before a value": (
        GOOD + term("GO:3", "is_a:"),
        ": , a parent of GO:3, is not in the file",
    ),
    "cut before the namespace": (GOOD + "[Term]\nid: GO:3\nname: x\n", "ends inside term 'GO:3'"),
    "cut inside the namespace": (GOOD + "[Term]\nid: GO:3\nname: x\nnamespace: molec", "ends inside term 'GO:3'"),
    "cut inside a definition": (GOOD + term("GO:3") + '[Term]\nid: GO:5\ndef: "The', "ends inside term 'GO:5'"),
    "cut before a parent": (term("GO:2", "is_a: GO:3"), "GO:3, a parent of GO:2, is not in the file"),
    "twice": (GOOD + term("GO:2"), "term GO:2 has two different definitions"),
    "alternative id of two": (GOOD + term("GO:3", "alt_id: GO:2"), "GO:2, an alternative id of GO:3, is also a term"),
    "no key": (GOOD + "[Term]\n<html>\n", "line 16: '<html>' is not a 'key: value' line of OBO"),
    "empty": ("", "contains no terms"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_no_ontology_is_refused(tmp_path, kind):
    text, words = REFUSED[kind]
    with pytest.raises(DataError, match=r"terms\.obo") as refused:
        read(tmp_path, text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    path = tmp_path / "terms.obo.gz"
    path.write_bytes(gzip.compress((HEADER + GOOD * 50).encode())[:-20])
    with pytest.raises(DataError, match="truncated"):
        read_ontology(path)
    with pytest.raises(DataError, match="can't be read"):
        read_ontology(tmp_path / "absent.obo")


ALL = "[Term]\nid: HP:1\nname: All\n\n[Term]\nid: HP:2\nis_a: HP:1 ! All"


@pytest.mark.parametrize(
    ("text", "namespace"),
    [
        (f"format-version: 1.2\ndefault-namespace: human_phenotype\n\n{ALL}", "human_phenotype"),
        (f"format-version: 1.2\nontology: mondo\n\n{ALL}", "mondo"),
        (f"ontology: hp\ndefault-namespace: human_phenotype ! of all terms\n\n{ALL}", "human_phenotype"),
        (f"default-namespace: cell\n\n{term('HP:1', namespace='cell')}[Term]\nid: HP:2\nis_a: HP:1\n", "cell"),
    ],
)
def test_terms_without_a_namespace_belong_to_the_files_own(tmp_path, text, namespace):
    path = tmp_path / "hp.obo"
    path.write_text(text)
    aspects = read_ontology(path).aspects
    assert {name: aspect.terms for name, aspect in aspects.items()} == {namespace: ("HP:1", "HP:2")}


def test_a_file_with_neither_namespaces_nor_a_default_is_refused(tmp_path):
    path = tmp_path / "terms.obo"
    path.write_text("[Term]\nid: HP:1\nname: All\n")
    with pytest.raises(DataError, match="term 'HP:1' has no id, or no namespace although the header has no default"):
        read_ontology(path)


STANZAS = [
    term("GO:1").strip(),
    term("GO:2", 'is_a: GO:1 {source="x"} ! one', "alt_id: GO:20 ! before").strip(),
    term("GO:3", 'relationship:  BFO:0000050   GO:1 {gci="y"}').strip(),
    term("GO:4", 'is_obsolete: true {at="z"}', "replaced_by: GO:2").strip(),
    "[Typedef]\nid: part_of\nname: part of\nis_transitive: true",
    "[Instance]\nid: x\ninstance_of: GO:1",
]


@given(
    order=st.permutations(STANZAS),
    header=st.sampled_from(["", HEADER, "! a comment\n" + HEADER]),
    gap=st.sampled_from(["\n", "\n\n", "\n\n\n! a comment\n", "\n! a: comment\n\n"]),
    within=st.sampled_from(["\n", "\n\n", "\n! comment\n", " \n"]),
    end=st.sampled_from(["", "\n", "\n\n", "\n! end"]),
    line_break=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
)
def test_every_layout_of_the_same_terms_is_the_same_ontology(
    tmp_path_factory, order, header, gap, within, end, line_break, mark
):
    text = header + gap.join(stanza.replace("\n", within) for stanza in order) + end
    path = tmp_path_factory.getbasetemp() / "layout.obo"
    path.write_bytes(("\ufeff" * mark + text.replace("\n", line_break)).encode())
    ontology = read_ontology(path)
    (aspect,) = ontology.aspects.values()
    child, parent = aspect.parents.nonzero()
    edges = {(aspect.terms[c], aspect.terms[p]) for c, p in zip(child, parent, strict=True)}
    assert edges == {("GO:2", "GO:1"), ("GO:3", "GO:1")}
    assert set(ontology.positions) == {"GO:1", "GO:2", "GO:3", "GO:20"}
