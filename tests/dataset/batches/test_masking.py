"""Masking follows its shares, never leaves a sequence without a target, and depends on record and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.batches.masking import NO_TARGET, mask_tokens, residue_targets
from dataset.tokens.esm import CLS, EOS, MASK, STANDARD_RESIDUES, cumulative_lengths, encode
from train_config.schema import MaskedLMSection

SHARES = MaskedLMSection()
sequences = st.lists(st.text(alphabet="ACDEFGHIKLMNPQRSTVWYXBUZO", min_size=1, max_size=50), min_size=1, max_size=8)
shares = st.builds(
    MaskedLMSection,
    mask_share=st.floats(0.001, 0.999),
    mask_token_share=st.floats(0, 0.5),
    random_token_share=st.floats(0, 0.5),
)


def packed(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    tokens = [encode(text).astype(np.uint8) for text in texts]
    return np.concatenate(tokens), cumulative_lengths(np.array([ids.size for ids in tokens]))


@settings(deadline=None)
@given(texts=sequences, shares=shares, seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_every_sequence_has_a_target_and_targets_are_what_was_there(texts, shares, seed, epoch):
    tokens_T, cu_seqlens = packed(texts)
    before_T = tokens_T.copy()
    inputs_T, targets_T, chosen_M = mask_tokens(tokens_T, cu_seqlens, np.arange(len(texts)), shares, seed, epoch)
    chosen_T = targets_T != NO_TARGET
    assert chosen_M.tolist() == chosen_T.nonzero()[0].tolist()
    assert np.add.reduceat(chosen_T, cu_seqlens[:-1]).min() >= 1
    assert (targets_T[chosen_T] == tokens_T[chosen_T]).all()
    assert (inputs_T[~chosen_T] == tokens_T[~chosen_T]).all()
    assert not np.isin(tokens_T[chosen_T], (CLS, EOS)).any()
    assert (tokens_T == before_T).all()


@settings(deadline=None)
@given(texts=sequences, data=st.data())
def test_masks_do_not_depend_on_company_or_order(texts, data):
    index = data.draw(st.integers(0, len(texts) - 1))
    tokens_T, cu_seqlens = packed(texts)
    own = slice(cu_seqlens[index], cu_seqlens[index + 1])
    records_N = np.arange(len(texts)) + 100
    together = mask_tokens(tokens_T, cu_seqlens, records_N, SHARES, 7, 3)
    alone = mask_tokens(*packed([texts[index]]), records_N[index : index + 1], SHARES, 7, 3)
    for whole, single in zip(together[:2], alone[:2], strict=True):
        assert (whole[own] == single).all()


def test_shares_are_met():
    tokens_T, cu_seqlens = packed(["ACDEFGHIKLMNPQRSTVWY" * 25] * 400)
    inputs_T, targets_T, _ = mask_tokens(tokens_T, cu_seqlens, np.arange(400), SHARES, 0, 0)
    chosen_T = targets_T != NO_TARGET
    assert chosen_T.sum() / (400 * 500) == pytest.approx(0.15, abs=0.005)
    assert (inputs_T[chosen_T] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    # A random residue is the one that was there once in twenty times.
    assert (inputs_T[chosen_T] == targets_T[chosen_T]).mean() == pytest.approx(0.1 + 0.1 / 20, abs=0.01)
    drawn = inputs_T[chosen_T & (inputs_T != MASK) & (inputs_T != targets_T)]
    assert set(drawn.tolist()) == set(STANDARD_RESIDUES.tolist())


def test_positions_and_residues_are_masked_equally_often():
    tokens_T, cu_seqlens = packed(["ACDEFGHIKLMNPQRSTVWY"] * 20_000)
    targets_T = mask_tokens(tokens_T, cu_seqlens, np.arange(20_000), SHARES, 0, 0).targets
    by_position = (targets_T.reshape(20_000, 22)[:, 1:-1] != NO_TARGET).mean(axis=0)
    assert by_position.max() - by_position.min() < 0.015


def test_masks_change_with_the_epoch_and_the_seed():
    tokens_T, cu_seqlens = packed(["ACDEFGHIKLMNPQRSTVWY" * 10])
    masks = [
        mask_tokens(tokens_T, cu_seqlens, np.array([5]), SHARES, seed, epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert len({masked.targets.tobytes() for masked in masks}) == 3


def test_sequence_without_residues_has_no_target():
    tokens_T, cu_seqlens = packed(["", "M"])
    inputs_T, targets_T, _ = mask_tokens(tokens_T, cu_seqlens, np.array([0, 1]), SHARES, 0, 0)
    assert targets_T.tolist() == [NO_TARGET, NO_TARGET, NO_TARGET, tokens_T[3], NO_TARGET]
    assert inputs_T[[0, 1, 2, 4]].tolist() == [CLS, EOS, CLS, EOS]


def test_reconstruction_takes_every_residue_as_target_and_no_special_token():
    tokens_T, _ = packed(["MX", "U"])
    expected = [NO_TARGET, *tokens_T[1:3], NO_TARGET, NO_TARGET, tokens_T[5], NO_TARGET]
    assert residue_targets(tokens_T).tolist() == expected
