"""Rules of the prediction file of CAFA 6.

A line is protein, term and score, separated by tabs, without a header. Scores are in (0, 1] with at most three digits.
A protein has at most 1,500 terms over all aspects, each once. Roots do not count in the competition and are left out.
"""

import re
from itertools import groupby
from pathlib import Path

from esmeray.common.errors import DataError
from esmeray.dataset.table import numbered_lines
from esmeray.function.ontology import Ontology
from esmeray.function.section import MAX_TERMS

_LINE = re.compile(r"\S+\t(\S+)\t(?!0\.0+$)(?:0\.\d{1,3}|1(?:\.0{1,3})?)")


def check_submission(path: Path, ontology: Ontology) -> None:
    """Raise DataError with the first line that breaks a rule.

    Lines of a protein must be consecutive, as predictions are written. Only the terms of one protein are in memory.
    """
    # Alternative ids are not allowed: a term could otherwise have two scores.
    allowed = {
        term
        for aspect in ontology.aspects.values()
        for term, level in zip(aspect.terms, aspect.levels, strict=True)
        if level > 0
    }
    proteins: set[str] = set()
    for protein, lines in groupby(numbered_lines(path), key=lambda line: line[1].split("\t")[0]):
        terms: set[str] = set()
        for number, line in lines:
            match = _LINE.fullmatch(line)
            term = match[1] if match else ""
            problems = {
                "is not PROTEIN, TERM and SCORE separated by tabs (score above 0, at most 1, at most three "
                "digits)": not match,
                "has a term that is a root or not in the ontology": term not in allowed,
                "repeats a term of the protein": term in terms,
                f"exceeds {MAX_TERMS:,} terms for the protein": len(terms) == MAX_TERMS,
                "is separated from the protein's other lines": protein in proteins,
            }
            broken = [problem for problem, holds in problems.items() if holds]
            if broken:
                raise DataError(f"{path}, line {number}: {line[:60]!r} {broken[0]}; predict again")
            terms.add(term)
        proteins.add(protein)
