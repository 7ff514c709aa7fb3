"""Matrices, and BLAST's own values for its scores."""

import numpy as np
import pytest

from esmeray.alignment.scoring import MATRICES, scoring
from esmeray.common.errors import ConfigError, DataError, EsmerayError

BLASTP = [(350, 139.428), (219, 88.9669), (204, 83.1889), (29, 15.779)]
"""Scores and bits of BLASTP 2.2.26+, BLOSUM62 with 11 and 1 (Biopython's xml_2226_blastp_003.xml)."""
BLASTX = [(83, 100, 0.413145), (122, 132, 1.87805e-06), (124, 136, 1.05191e-06)]
"""Score, length of the subject and E-value of BLASTX 2.2.26+, for 161 residues and 4,397,139,428 in the database
(Biopython's xml_2226_blastx_004.xml). It divides by 0.9, for gaps between HSPs, and is off by a factor in the normal
distribution that later versions mended."""


def test_bit_scores_are_those_of_blast():
    scores, bits = np.array(BLASTP).T
    statistics = scoring().statistics
    assert statistics is not None
    np.testing.assert_allclose(statistics.bits(scores), bits, rtol=1e-5)


def test_evalues_are_those_of_blast_within_a_tenth():
    scores, lengths, evalues = np.array(BLASTX).T
    statistics = scoring().statistics
    assert statistics is not None
    np.testing.assert_allclose(statistics.evalues(scores, 161, lengths, 4397139428, 12), 0.9 * evalues, rtol=0.1)


def test_evalues_are_near_the_plain_ones_of_karlin_and_altschul_for_long_sequences():
    for name in MATRICES:
        by = scoring(name)
        assert by.statistics is not None
        scores, length = np.arange(60, 160, 20), 1_000_000
        plain = by.statistics.k * length * 10 * length * np.exp(-by.statistics.lambda_ * scores)
        found = by.statistics.evalues(scores, length, np.array(length), 10 * length, by.first)
        np.testing.assert_allclose(found, plain, rtol=0.01)
        assert (np.diff(found) < 0).all()


@pytest.mark.parametrize(("name", "gaps"), [("BLOSUM45", (14, 2)), ("blosum50", (13, 2)), ("PAM250", (14, 2))])
def test_penalties_are_those_of_blast_unless_given(name, gaps):
    by = scoring(name)
    assert (by.gap_open, by.gap_extend) == gaps and by.first == sum(gaps)
    assert scoring(name, 3, 3).statistics is None


def test_letters_that_the_matrix_lacks_are_scored_as_others():
    by = scoring()
    assert by.known(b"mkUuOoJjXBZ") == b"MKCCXXXXXBZ"
    for letter in (b"*", b"-", b"1", b"\0"):
        with pytest.raises(DataError, match="residue 3 is"):
            by.known(b"MK" + letter)


def test_a_matrix_is_read_from_a_file(tmp_path):
    path = tmp_path / "matrix"
    by = scoring()
    letters = by.letters + "*"
    rows = [f"{a} " + " ".join("-9" if "*" in a + b else str(score(by, a, b)) for b in letters) for a in letters]
    path.write_text("\n".join(["# a comment", "   " + "  ".join(letters), *rows]) + "\n")
    read = scoring(str(path), 11, 1)
    assert read.letters == by.letters and (read.scores == by.scores).all() and read.statistics is None
    assert (read.codes == by.codes).all()


def score(by, a: str, b: str) -> int:
    return by.scores[by.letters.index(a), by.letters.index(b)]


REFUSED = {
    "unknown": (None, {}, "did you mean BLOSUM62"),
    "no penalties": (" A R\nA 1 0\nR 0 1\n", {}, "give gap_open and gap_extend"),
    "empty": ("", {}, "has no column A"),
    "not text": ("Ä", {}, "can't be read as text"),
    "rows": (" A R\nA 1 0\n", {}, "letters of its rows"),
    "fraction": (" A R\nA 1 0.5\nR 0 1\n", {}, "line 2: 2 whole numbers"),
    "no X": (" A R\nA 1 0\nR 0 1\n", {}, "has no column C"),
    "lopsided": ("lopsided", {}, "is not symmetric"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_matrix_is_refused_in_one_line(case, tmp_path):
    text, _, words = REFUSED[case]
    if text == "lopsided":
        letters = scoring().letters
        text = " ".join(letters) + "\n" + "".join(f"{a} {' '.join('210'[i % 3] for i in range(23))}\n" for a in letters)
    path = tmp_path / "matrix"
    path.write_text(text or "", encoding="utf-8")
    with pytest.raises(EsmerayError, match=words) as refused:
        scoring("BLOSUM63" if text is None else str(path), *(() if case == "no penalties" else (1, 1)))
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ConfigError if case in ("unknown", "no penalties") else DataError)
