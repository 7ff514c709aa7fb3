"""The file of predictions that CAFA 6 takes, by its rules.

A line is protein, term and score, separated by tabs, without a header. Scores are in (0, 1] with at most three digits.
A protein has at most 1,500 terms over all aspects, each once. Roots do not count in the competition and are left out.
"""

import re
from itertools import groupby
from pathlib import Path

from esmeray.common.errors import DataError
from esmeray.dataset.table import numbered_lines
from esmeray.function.ontology import Ontology
from esmeray.function.section import MOST_TERMS

_SCORE = re.compile(r"0\.\d{1,3}|1(\.0{1,3})?")


def check_submission(path: Path, ontology: Ontology) -> None:
    """Raise DataError with the first line that breaks a rule.

    Lines of a protein have to stand together, as predictions are written: of a file of any size, the terms of one
    protein alone are in memory.
    """
    rows = ((number, line.split("\t")) for number, line in numbered_lines(path))
    proteins: set[str] = set()
    for protein, lines in groupby(rows, key=lambda row: row[1][0]):
        terms: set[str] = set()
        for number, row in lines:
            problem = _problem(row, ontology, terms)
            if protein in proteins:
                problem = f"lines of {protein!r} stand apart"
            if problem:
                raise DataError(f"{path}, line {number}: {problem}; CAFA 6 would not take the file: predict again")
            terms.add(row[1])
        proteins.add(protein)


def _problem(row: list[str], ontology: Ontology, terms: set[str]) -> str:
    """Problem of a line's fields, which follows those with these terms of the protein; empty where there is none."""
    if len(row) != 3 or row != "\t".join(row).split():  # blanks in a field, or an empty one, make another row
        return f"protein, term and score were expected, with a tab between them, got {row}"
    _, term, score = row
    aspect, column = ontology.positions.get(term, ("", -1))
    # An alternative id would be a second name of a term, which then had two scores.
    if not aspect or term in ontology.alternatives:
        return f"{term!r} is no term of the ontology"
    if ontology.aspects[aspect].levels[column] == 0:
        return f"{term} is a root"
    if not _SCORE.fullmatch(score) or float(score) == 0:
        return f"the score {score!r} is not above 0, at most 1, with at most three digits"
    if term in terms:
        return f"{term} stands twice"
    return f"more than {MOST_TERMS:,} terms of a protein" if len(terms) == MOST_TERMS else ""
