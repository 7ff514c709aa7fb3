"""Bit scores of similar proteins."""

from __future__ import annotations

import math

import parasail
import pytest

from dataset.store.sample import sample_records
from function.composition import CHANNELS, composition
from function.hits import LAMBDA, K, hits
from train_config.function_schema import HomologySection


@pytest.fixture(scope="module")
def proteins() -> list[tuple[str, str]]:
    return list(sample_records(60, 6, seed=3))


def test_members_of_a_family_are_hits_and_others_are_not(proteins):
    texts = [text for _, text in proteins]
    found = hits(texts[:20], texts, HomologySection()).tocoo()
    families = [name.partition("_")[0] for name, _ in proteins]
    assert all(families[row] == families[column] for row, column in zip(*found.coords, strict=True))
    assert found.nnz > 150


def test_bit_scores_are_those_of_the_whole_alignment(proteins):
    first, second = proteins[0][1], proteins[1][1]
    score = parasail.sw(first, second, 12, 1, parasail.blosum62).score
    found = hits([first], [second], HomologySection(max_evalue=10))
    assert found[0, 0] == pytest.approx((LAMBDA * score - math.log(K)) / math.log(2))


def test_short_unknown_and_missing_sequences_have_no_hits():
    assert hits(["M", "XXXXXX", "MKT"], ["MKTAYIAKQR", "M"], HomologySection()).nnz == 0
    assert hits([], ["MKTAYIAKQR"], HomologySection()).shape == (0, 1)
    assert hits(["MKTAYIAKQR"], [], HomologySection()).shape == (1, 0)


def test_composition_counts_words_of_amino_acids_alone():
    vectors = composition(["MKTAYIAKQR", "MKTAYIAKQRX", "X", ""])
    assert vectors.shape == (4, CHANNELS)
    assert (vectors[0] == vectors[1]).all()
    assert (vectors[0] ** 2).sum() == pytest.approx(3, rel=1e-5) and not vectors[2:].any()
