"""OBO files as arrays, and those that are refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest

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
    "cyclic": (term("GO:1", "is_a: GO:2") + term("GO:2", "is_a: GO:1"), "run in a circle at or above GO:1"),
    "a term its own parent": (GOOD + term("GO:3", "is_a: GO:3"), "run in a circle at or above GO:3"),
    "cut inside a line": (GOOD + term("GO:3", "is_a: GO:1").rstrip(), "ends inside a line: the file is cut off"),
    "cut before the namespace": (GOOD + "[Term]\nid: GO:3\nname: x\n", "term 'GO:3' has no namespace"),
    "cut before a parent": (term("GO:2", "is_a: GO:3"), "GO:3, a parent of GO:2, is not in the file"),
    "twice": (GOOD + term("GO:2"), "term GO:2 is defined twice"),
    "alternative id of two": (GOOD + term("GO:3", "alt_id: GO:2"), "GO:2, an alternative id of GO:3, is a term"),
    "no key": (GOOD + "[Term]\n<html>\n", "line 16: '<html>' is no 'key: value' of OBO"),
    "empty": ("", "holds no terms"),
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
    for bad in (path, tmp_path / "absent.obo"):
        with pytest.raises(DataError, match="can't be read"):
            read_ontology(bad)
