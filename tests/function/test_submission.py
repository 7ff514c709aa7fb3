"""Submission files for CAFA 6 follow its rules, or are refused."""

from pathlib import Path

import pytest

from esmeray.common.errors import DataError
from esmeray.function.ontology import read_ontology
from esmeray.function.submission import check_submission
from tests.function.test_ontology import term

ONTOLOGY = term("GO:0") + term("GO:1", "is_a: GO:0", "alt_id: GO:old")
ONTOLOGY += "".join(term(f"GO:{number}", "is_a: GO:1") for number in range(2, 1502))
OF_P1 = [f"P1\tGO:{number}\t0.5" for number in range(1, 1501)]
FORM = "is not PROTEIN, TERM and SCORE separated by tabs (score above 0, at most 1, at most three digits)"
REFUSED = {
    "a header": (["protein\tterm\tscore"], f"line 1: 'protein\\tterm\\tscore' {FORM}"),
    "blanks for tabs": (["P1 GO:1 0.5"], FORM),
    "a blank in a field": (["P1\tGO:1 \t0.5"], FORM),
    "an empty line": ([*OF_P1, ""], f"line 1501: '' {FORM}"),
    "a root": (["P1\tGO:0\t1.000"], "has a term that is a root or not in the ontology"),
    "an alternative id": (["P1\tGO:old\t0.5"], "has a term that is a root or not in the ontology"),
    "a score of 0": (["P1\tGO:1\t0.000"], FORM),
    "a score above 1": (["P1\tGO:1\t1.001"], FORM),
    "four digits": (["P1\tGO:1\t0.1234"], FORM),
    "a term twice": ([*OF_P1[:3], OF_P1[0]], r"line 4: 'P1\tGO:1\t0.5' repeats a term of the protein"),
    "too many terms": ([*OF_P1, "P1\tGO:1501\t0.5"], "exceeds 1,500 terms for the protein"),
    "a protein again": (
        ["P1\tGO:1\t0.5", "P2\tGO:1\t0.5", "P1\tGO:2\t0.5"],
        r"line 3: 'P1\tGO:2\t0.5' is separated",
    ),
}


def check(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "terms.obo").write_text(ONTOLOGY)
    (tmp_path / "submission.tsv").write_text("".join(f"{line}\n" for line in lines))
    check_submission(tmp_path / "submission.tsv", read_ontology(tmp_path / "terms.obo"))


@pytest.mark.parametrize("kind", REFUSED)
def test_all_that_a_protein_may_have_is_taken_and_more_refused(tmp_path, kind):
    check(tmp_path, [*OF_P1, "P2\tGO:1\t1", "P2\tGO:2\t1.000", "P2\tGO:3\t0.001"])
    lines, words = REFUSED[kind]
    with pytest.raises(DataError, match=r"submission\.tsv, line") as refused:
        check(tmp_path, lines)
    assert words in str(refused.value)
