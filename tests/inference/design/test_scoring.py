"""Novelty is what the best local alignment with a known sequence leaves different."""

import pytest

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
    swap = {letter: AMINO_ACIDS[index - 3] for index, letter in enumerate(AMINO_ACIDS)}
    changed = "".join(swap[letter] if index % 10 == 5 else letter for index, letter in enumerate(KNOWN[0]))
    assert nearest(changed, known) == ("k0", pytest.approx(0.1))
