import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.variants import Protein

PROTEIN = Protein("MKTXAY", first=24)
LETTERS = st.text(AMINO_ACIDS, min_size=1, max_size=12)


@settings(deadline=None)
@given(LETTERS, st.data())
def test_notation_sequence_and_mutant_are_one(wild, data):
    protein = Protein(wild, data.draw(st.integers(1, 900)))
    sequence = data.draw(st.text(AMINO_ACIDS, min_size=len(wild), max_size=len(wild)))
    mutant = protein.mutant_of(sequence)
    assert mutant.sequence(wild) == sequence
    if mutant.mutations:
        texts = data.draw(st.permutations([protein.text(mutation) for mutation in mutant.mutations]))
        assert protein.mutant(":".join(texts)) == mutant


REFUSED = {
    "K26A": "the sequence has another residue at position 26",
    "K30A": "position 30 is not of the sequence, which has 24 to 29",
    "K2A": "position 2 is not of the sequence, which has 24 to 29",
    "K25*": "a stop has no score",
    "K25": "is none; write it as A12G",
    "K25A,T26A": "is none; write it as A12G",
    "": "is none; write it as A12G",
    "X27A": "is none; write it as A12G",
    "K25A:K25G": "position 25 is mutated twice",
}


def test_what_no_mutant_of_the_protein_is_is_refused_in_words():
    for text, words in REFUSED.items():
        with pytest.raises(ValueError, match="^" + words):
            PROTEIN.mutant(text)
    for sequence, words in ("", "is empty"), ("MKT*AY", "is no amino acid"), ("MKTAAY", "position 27 is no amino acid"):
        with pytest.raises(ValueError, match=words):
            PROTEIN.mutant_of(sequence)
