"""A mutant is equal in every notation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.variants import Protein, UnscoredError
from tests.inference.mutations.spellings import spelled

PROTEIN = Protein("MKTXAY", first=24)
LETTERS = st.text(AMINO_ACIDS, min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(LETTERS, st.data())
def test_notation_sequence_and_mutant_are_one(wild, data):
    protein = Protein(wild, data.draw(st.integers(1, 900)))
    sequence = data.draw(st.text(AMINO_ACIDS, min_size=len(wild), max_size=len(wild)))
    mutant = protein.mutant_of(sequence)
    assert mutant.sequence(wild) == sequence and protein.mutant_of(f"{sequence.lower()}*") == mutant
    assert protein.mutant(data.draw(spelled(protein, mutant))) == mutant


@pytest.mark.parametrize(
    ("text", "mutant"),
    [
        *((text, "") for text in ("WT", "wt", "_wt", "_sy", "p.=", "p.(=)", "Wild-type", "p.Lys25=", "=;=")),
        *(
            (text, "K25A")
            for text in ("25A", "p.(K25A)", "p.[Lys25Ala;=]", "Q9Y6K9:p.K25A", "NP_000509.1(HBB):p.Lys25Ala")
        ),
        *((text, "K25A:T26C") for text in ("T26C_K25A", "25A_26C", "p.Lys25Ala,p.Thr26Cys", "K25A-T26C")),
        *((text, "K25A:T26C") for text in ("p.Lys25_Thr26delinsAlaCys", "Lys25Ala:p.Thr26Cys", "p.K25A:p.T26C")),
    ],
)
def test_notations_of_databases_and_tools_are_read(text, mutant):
    assert PROTEIN.text_of(PROTEIN.mutant(text)) == mutant


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("a stop", ("K25*", "p.Lys25Ter", "k25ter", "T26C:K25*")),
        ("a deletion", ("K25del", "p.Lys25_Thr26del", "K25-")),
        ("an insertion", ("p.Lys25_Thr26insGly", "K25_T26insGLY")),
        ("a delins", ("p.Lys25delinsGlyPro", "p.Lys25_Thr26delinsGly")),
        ("a frameshift", ("p.Lys25fs", "p.Lys25ArgfsTer5", "p.(Lys25fs*?)")),
        ("an extension", ("p.Met24ext-5",)),
        ("a changed stop", ("p.Ter30Gln", "*30Qext*5", "p.Ter30=")),
        ("a duplication", ("p.Lys25dup",)),
        ("an unknown protein", ("p.?", "p.0", "p.(0?)")),
    ],
)
def test_a_notation_of_more_than_substitutions_has_no_score_and_a_name(kind, texts):
    for text in texts:
        with pytest.raises(UnscoredError, match=f"^{kind} has no score"):
            PROTEIN.mutant(text)


def test_another_first_position_that_fits_all_is_named():
    protein = Protein("MKTAYIAKQR")
    assert protein.hint(["A27G", "p.Tyr28Asp", "WT"], "first") == "every mutant would match with first 24"
    assert protein.hint(["A4G"], "first") == protein.hint(["4G"], "first") == protein.hint(["W9A"], "first") == ""


REFUSED = {
    "K26A": "the sequence has another residue at position 26",
    "K30A": "position 30 is outside the sequence .24 to 29.",
    "K2A": "position 2 is outside the sequence .24 to 29.",
    "K25": "is not a mutation; write it like A12G",
    "K25A,T26": "is not a mutation; write it like A12G",
    "K25_T26A": "is not a mutation; write it like A12G",
    "p.[Lys25Ala];[Thr26Cys]": "describes two alleles",
    "c.11C>G": "is not a mutation; write it like A12G",
    "NaN": "is not a mutation; write it like A12G",
    "WT:K25A": "is not a mutation; write it like A12G",
    "27A": "position 27 of the sequence is not an amino acid",
    "T25*": "the sequence has another residue at position 25",
    "": "is empty",
    "X27A": "is not a mutation; write it like A12G",
    "K25A:K25G": "position 25 is mutated twice",
}


def test_what_no_mutant_of_the_protein_is_is_refused_in_words():
    for text, words in REFUSED.items():
        with pytest.raises(ValueError, match="^" + words):
            PROTEIN.mutant(text)
    for sequence, words in (
        ("", "the sequence is empty"),
        ("MKTXBY", "'B' is not an amino acid"),
        ("MKT*AY", "a stop has no score"),
        ("MKTAAY", "position 27 of the sequence is not an amino acid"),
    ):
        with pytest.raises(ValueError, match=words):
            PROTEIN.mutant_of(sequence)
