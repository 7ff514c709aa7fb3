"""Substitution matrices, and bit scores and E-values compared with BLAST's."""

import numpy as np
import pytest

from esmeray.alignment.scoring import MATRICES, scoring
from esmeray.common.errors import ConfigError, DataError

BLASTP = [(350, 139.428), (219, 88.9669), (204, 83.1889), (29, 15.779)]
"""Scores and bit scores of BLASTP 2.2.26+, BLOSUM62 with gap costs 11 and 1 (Biopython's xml_2226_blastp_003.xml)."""
BLASTX = [(83, 100, 0.413145), (122, 132, 1.87805e-06), (124, 136, 1.05191e-06)]
"""Score, subject length and E-value of BLASTX 2.2.26+ for a query of 161 residues and a database of 4,397,139,428
(Biopython's xml_2226_blastx_004.xml). This version divides by 0.9 for gaps between HSPs, and has a wrong factor in the
normal distribution that later versions fixed."""


def test_bit_scores_are_those_of_blast_and_evalues_within_a_tenth():
    statistics = scoring().statistics
    assert statistics is not None
    scores, bits = np.array(BLASTP).T
    np.testing.assert_allclose(statistics.bits(scores), bits, rtol=1e-5)
    scores, lengths, evalues = np.array(BLASTX).T
    np.testing.assert_allclose(statistics.evalues(scores, 161, lengths, 4397139428, 12), 0.9 * evalues, rtol=0.1)


def test_evalues_of_long_sequences_are_near_karlin_and_altschuls():
    for name in MATRICES:
        by = scoring(name)
        assert by.statistics is not None
        scores, length = np.arange(60, 160, 20), 1_000_000
        plain = by.statistics.k * length * 10 * length * np.exp(-by.statistics.lambda_ * scores)
        evalues = by.statistics.evalues(scores, length, np.array(length), 10 * length, by.first)
        np.testing.assert_allclose(evalues, plain, rtol=0.01)


@pytest.mark.parametrize(("name", "gaps"), [("BLOSUM45", (14, 2)), ("blosum50", (13, 2)), ("PAM250", (14, 2))])
def test_penalties_are_those_of_blast_unless_given(name, gaps):
    by = scoring(name)
    assert (by.gap_open, by.gap_extend) == gaps and by.first == sum(gaps)
    assert scoring(name, 3, 3).statistics is None


def test_letters_that_the_matrix_lacks_are_scored_as_others():
    by = scoring()
    assert by.known(b"mkUuOoJjXBZ") == b"MKCCXXXXXBZ"
    for letter in (b"*", b"-", b"1", b"\0"):
        with pytest.raises(DataError, match=r"residue 3, .*not an amino acid"):
            by.known(b"MK" + letter)


def test_a_matrix_is_read_from_a_file(tmp_path):
    path = tmp_path / "matrix"
    by = scoring()
    rows = [f"{letter} {' '.join(map(str, row))} -9" for letter, row in zip(by.letters, by.scores, strict=True)]
    path.write_text("\n".join(["# a comment", " ".join(by.letters + "*"), *rows, "* " + "-9 " * 24]) + "\n")
    read = scoring(str(path), 11, 1)
    assert read.letters == by.letters and (read.scores == by.scores).all() and read.statistics is None
    assert (read.codes == by.codes).all()


LETTERS = scoring().letters
REFUSED = {
    "empty": ("", "column A is missing"),
    "not text": ("Ä", "damaged ..ascii"),
    "rows": (" A R\nA 1 0\n", "rows and columns have different letters"),
    "fraction": (" A R\nA 1 0.5\nR 0 1\n", "line 2: expected 2 integers after"),
    "no X": (" A R\nA 1 0\nR 0 1\n", "column C is missing"),
    "lopsided": (" ".join(LETTERS) + "\n" + "".join(f"{a} {'2 1 0 ' * 7}2 1\n" for a in LETTERS), "is not symmetric"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_matrix_is_refused_in_one_line(case, tmp_path):
    text, words = REFUSED[case]
    path = tmp_path / "matrix"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words) as refused:
        scoring(str(path), 1, 1)
    assert "\n" not in str(refused.value)


def test_a_file_without_penalties_is_refused(tmp_path):
    (tmp_path / "matrix").write_text(REFUSED["no X"][0])
    with pytest.raises(ConfigError, match="needs gap_open and gap_extend"):
        scoring(str(tmp_path / "matrix"))
