"""Identities between proteins, as MMseqs2 defines them, and clusters by them."""

import numpy as np

from esmeray.alignment.similarity import identity_clusters, nearest_identity
from tests.alignment.test_search import store_of
from tests.model.support import random_sequences


def changed(sequence: str, every: int) -> str:
    """Substitute one residue in ``every``, by W, or by F if it is W."""
    return "".join(
        letter if index % every else "F" if letter == "W" else "W" for index, letter in enumerate(sequence, 1)
    )


def test_identity_is_that_of_the_nearest_protein_over_most_of_both(tmp_path):
    first, second, stranger = random_sequences([200, 300, 250])
    training = [first, changed(first, 4), second]
    store = store_of(tmp_path, [second, *training, "MK", stranger])
    queries = [first, changed(first, 10), first[:100] + first[105:], stranger, first[:150], second + stranger, "MK"]
    identities = nearest_identity(queries, store, np.arange(1, 5))
    # A local alignment leaves out the last residue, which differs. A deletion of five residues is five columns.
    assert identities.tolist() == [1.0, 180 / 199, 0.975, 0.0, 0.0, 0.0, 1.0]
    assert nearest_identity([], store, np.arange(1, 5)).shape == (0,)


def test_clusters_are_chains_of_similar_proteins(tmp_path):
    first, stranger = random_sequences([200, 250])
    # Each is similar to the next, the first and the last are not similar to each other; peptides of one residue apart.
    chain = [first, changed(first, 2), changed(changed(first, 2), 3)]
    store = store_of(tmp_path, [stranger, *chain, "MKV", stranger[:100], "MKV", "MKL"])
    clusters = identity_clusters(store, 0.45)
    _, numbers = np.unique(clusters, return_inverse=True)
    assert len({*clusters[1:4]}) == 1 and clusters[4] == clusters[6]
    assert len({*numbers}) == 5, "a fragment of 40 % and a short peptide are apart"
    assert len({*identity_clusters(store, 0.99)}) == 7
