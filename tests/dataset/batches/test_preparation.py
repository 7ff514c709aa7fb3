"""A record is cropped and masked independently of the rest of its batch; masks follow their shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.batches.preparation import (
    NO_TARGET,
    CropCount,
    PreparationSettings,
    count_cropped,
    crop_starts,
    mask_tokens,
    prepare_batch,
)
from esmeray.dataset.batches.random_bits import splitmix64
from esmeray.dataset.tokens.esm import CLS, EOS, MASK, STANDARD_RESIDUES, cumulative_lengths, encode
from esmeray.tasks.masked_lm.section import MaskedLMSection

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


@settings(deadline=None, max_examples=40)
@given(texts=sequences, shares=shares, seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_every_sequence_has_a_target_and_targets_are_what_was_there(texts, shares, seed, epoch):
    tokens_T, cu_seqlens = packed(texts)
    before_T = tokens_T.copy()
    inputs_T, targets_T, _, chosen_M = mask_tokens(tokens_T, cu_seqlens, np.arange(len(texts)), shares, seed, epoch)
    chosen_T = targets_T != NO_TARGET
    assert chosen_M.tolist() == chosen_T.nonzero()[0].tolist()
    assert np.add.reduceat(chosen_T, cu_seqlens[:-1]).min() >= 1
    assert (targets_T[chosen_T] == tokens_T[chosen_T]).all()
    assert (inputs_T[~chosen_T] == tokens_T[~chosen_T]).all()
    assert not np.isin(tokens_T[chosen_T], (CLS, EOS)).any()
    assert (tokens_T == before_T).all()


def test_shares_are_met():
    tokens_T, cu_seqlens = packed(["ACDEFGHIKLMNPQRSTVWY" * 25] * 400)
    inputs_T, targets_T, _, _ = mask_tokens(tokens_T, cu_seqlens, np.arange(400), SHARES, 0, 0)
    chosen_T = targets_T != NO_TARGET
    assert chosen_T.sum() / (400 * 500) == pytest.approx(0.15, abs=0.005)
    by_letter = chosen_T.reshape(400, 502)[:, 1:-1].reshape(-1, 20).mean(axis=0)
    assert by_letter.max() - by_letter.min() < 0.03, "letters and positions are masked equally often"
    assert (inputs_T[chosen_T] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    # One in twenty random residues equals the original residue.
    assert (inputs_T[chosen_T] == targets_T[chosen_T]).mean() == pytest.approx(0.1 + 0.1 / 20, abs=0.01)
    drawn = inputs_T[chosen_T & (inputs_T != MASK) & (inputs_T != targets_T)]
    assert set(drawn.tolist()) == set(STANDARD_RESIDUES.tolist())


class Sequences:
    """A minimal substitute for a store."""

    def __init__(self, sequences: list[str]) -> None:
        self.sequences = [text.encode() for text in sequences]
        self.lengths = np.array([len(text) for text in sequences], dtype=np.uint32)

    def windows(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        windows = zip(records, starts, lengths, strict=True)
        return [self.sequences[record][start : start + length] for record, start, length in windows]


def preparation(max_length: int = 20, random_crops: bool = True, masked: bool = False) -> PreparationSettings:
    return PreparationSettings(max_length, 3, random_crops, MaskedLMSection() if masked else None)


@settings(deadline=None, max_examples=40)
@given(sequences=sequences, epoch=st.integers(0, 3), data=st.data())
def test_tokens_are_those_of_the_cropped_sequences(sequences, epoch, data):
    records = np.array(data.draw(st.permutations(range(len(sequences)))))
    random_crops = data.draw(st.booleans())
    store = Sequences(sequences)
    prepared = prepare_batch(store, preparation(20, random_crops), epoch, records)
    starts = crop_starts(store.lengths[records], 20, records, 3, epoch) if random_crops else [0] * len(records)
    for index, (record, start) in enumerate(zip(records, starts, strict=True)):
        tokens = prepared.tokens[slice(*prepared.cu_seqlens[index : index + 2])]
        assert tokens.tolist() == encode(sequences[record][start : start + 20]).tolist()
    is_special = np.isin(prepared.tokens, (CLS, EOS))
    assert prepared.targets.tolist() == np.where(is_special, NO_TARGET, prepared.tokens).tolist()


@settings(deadline=None, max_examples=40)
@given(sequences=sequences, masked=st.booleans())
def test_result_does_not_depend_on_the_other_records_of_the_batch(sequences, masked):
    store = Sequences(sequences)
    together = prepare_batch(store, preparation(masked=masked), 1, np.arange(len(sequences)))
    for record in range(len(sequences)):
        own = slice(*together.cu_seqlens[record : record + 2])
        alone = prepare_batch(store, preparation(masked=masked), 1, np.array([record]))
        assert (alone.tokens == together.tokens[own]).all()
        assert (alone.targets == together.targets[own]).all()


def test_random_bits_are_those_of_the_reference_splitmix64():
    # First outputs of the reference C code (Vigna, prng.di.unimi.it/splitmix64.c) from state 1234567.
    gamma, state = 0x9E3779B97F4A7C15, 1234567
    states = np.array([(state + index * gamma) % 2**64 for index in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_every_window_is_equally_likely():
    starts_N = crop_starts(np.full(50_000, 19), 10, np.arange(50_000), seed=3, epoch=1)
    counts = np.bincount(starts_N)
    assert counts.size == 10 and np.abs(counts / 5000 - 1).max() < 0.08


def test_cropped_sequences_and_left_out_residues_are_counted():
    assert count_cropped(np.array([19, 10, 4]), 10) == CropCount(1, 9)
