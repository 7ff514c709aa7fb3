"""Novelty is what the best local alignment with a known sequence leaves different."""

import biotite.sequence as seq
import pytest
from biotite.sequence.align import SubstitutionMatrix, align_optimal

from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.reader import Store
from esmeray.inference.design.scoring import nearest
from tests.model.support import random_sequences

KNOWN = random_sequences([80, 300, 41, 120])


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Search:
    folder = tmp_path_factory.mktemp("known")
    (folder / "known.fasta").write_text("".join(f">k{number}\n{text}\n" for number, text in enumerate(KNOWN)))
    convert([str(folder / "known.fasta")], folder / "store", IngestSection())
    return Search(Store(folder / "store"), scoring())


def test_a_known_sequence_is_found_and_what_was_changed_is_counted(known: Search):
    assert nearest(KNOWN[1], known) == ("k1", 0.0)
    swap = {letter: AMINO_ACIDS[place - 3] for place, letter in enumerate(AMINO_ACIDS)}
    changed = "".join(swap[letter] if place % 10 == 5 else letter for place, letter in enumerate(KNOWN[0]))
    assert nearest(changed, known) == ("k0", pytest.approx(0.1))


def test_the_alignment_is_that_of_another_program(known: Search):
    matrix = SubstitutionMatrix(seq.ProteinSequence.alphabet, seq.ProteinSequence.alphabet, "BLOSUM62")
    for text in random_sequences([30, 64, 200], seed=3):
        pairs = [(seq.ProteinSequence(text), seq.ProteinSequence(one)) for one in KNOWN]
        scores = [align_optimal(*pair, matrix, (-12, -1), local=True)[0].score for pair in pairs]
        found = nearest(text, known)
        assert found.record == f"k{scores.index(max(scores))}" and 0.5 < found.novelty < 1
