"""Vectors of proteins without a model."""

import pytest

from esmeray.function.vectors import CHANNELS, composition


def test_composition_counts_words_of_amino_acids_alone():
    vectors = composition(["MKTAYIAKQR", "MKTAYIAKQRX", "X", ""])
    assert vectors.shape == (4, CHANNELS)
    assert (vectors[0] == vectors[1]).all()
    assert (vectors[0] ** 2).sum() == pytest.approx(3, rel=1e-5) and not vectors[2:].any()
