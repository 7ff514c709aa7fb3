"""Files for CAFA 6: what its rules take, and what they refuse."""

from pathlib import Path

import pytest

from esmeray.common.errors import DataError
from esmeray.function.ontology import read_ontology
from esmeray.function.submission import check_submission
from tests.function.test_ontology import term

ONTOLOGY = term("GO:0") + term("GO:1", "is_a: GO:0", "alt_id: GO:old")
ONTOLOGY += "".join(term(f"GO:{number}", "is_a: GO:1") for number in range(2, 1502))
OF_P1 = [f"P1\tGO:{number}\t0.5" for number in range(1, 1501)]
REFUSED = {
    "a header": (["protein\tterm\tscore"], "line 1: 'term' is no term of the ontology"),
    "blanks for tabs": (["P1 GO:1 0.5"], "line 1: protein, term and score were expected, with a tab"),
    "a blank in a field": (["P1\tGO:1 \t0.5"], "line 1: protein, term and score were expected"),
    "an empty line": ([*OF_P1, ""], "line 1501: protein, term and score were expected"),
    "a root": (["P1\tGO:0\t1.000"], "GO:0 is a root"),
    "an alternative id": (["P1\tGO:old\t0.5"], "'GO:old' is no term"),
    "a score of 0": (["P1\tGO:1\t0.000"], "the score '0.000' is not above 0"),
    "a score above 1": (["P1\tGO:1\t1.001"], "at most 1"),
    "four digits": (["P1\tGO:1\t0.1234"], "at most three digits"),
    "a term twice": ([*OF_P1[:3], OF_P1[0]], "line 4: GO:1 stands twice"),
    "too many terms": ([*OF_P1, "P1\tGO:1501\t0.5"], "line 1501: more than 1,500 terms of a protein"),
    "a protein again": (["P1\tGO:1\t0.5", "P2\tGO:1\t0.5", "P1\tGO:2\t0.5"], "line 3: lines of 'P1' stand apart"),
}


def check(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "terms.obo").write_text(ONTOLOGY)
    (tmp_path / "submission.tsv").write_text("".join(f"{line}\n" for line in lines))
    check_submission(tmp_path / "submission.tsv", read_ontology(tmp_path / "terms.obo"))


def test_all_that_a_protein_may_have_is_taken(tmp_path):
    check(tmp_path, [*OF_P1, "P2\tGO:1\t1", "P2\tGO:2\t1.000", "P2\tGO:3\t0.001"])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_breaks_a_rule_is_refused_with_its_line(tmp_path, kind):
    lines, words = REFUSED[kind]
    with pytest.raises(DataError, match=r"submission\.tsv, line") as refused:
        check(tmp_path, lines)
    assert words in str(refused.value)
