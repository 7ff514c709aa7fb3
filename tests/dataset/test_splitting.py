"""Splitting by a hash of the sequence: duplicates together, stable, both sides non-empty where that is possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.splitting import split_records
from train_config.errors import DataError

hash_lists = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60)
shares = st.floats(0.001, 0.999)


def as_hashes(values) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@settings(deadline=None)
@given(hashes=hash_lists, share=st.one_of(st.just(0.0), shares))
def test_every_record_lands_on_exactly_one_side(hashes, share):
    if share and len(set(hashes)) == 1:
        return
    training, validation = split_records(as_hashes(hashes), share)
    assert sorted([*training, *validation]) == list(range(len(hashes)))


@settings(deadline=None)
@given(hashes=hash_lists, copies=st.integers(2, 4), share=shares)
def test_duplicates_never_fall_on_both_sides(hashes, copies, share):
    if len(set(hashes)) == 1:
        return
    repeated = as_hashes(hashes * copies)
    training, validation = split_records(repeated, share)
    assert not set(repeated[training].tolist()) & set(repeated[validation].tolist())


@settings(deadline=None)
@given(hashes=hash_lists, share=shares)
def test_both_sides_hold_something_when_there_are_two_sequences(hashes, share):
    if len(set(hashes)) == 1:
        return
    training, validation = split_records(as_hashes(hashes), share)
    assert training.size
    assert validation.size


@settings(deadline=None)
@given(hashes=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60, unique=True), share=shares, data=st.data())
def test_split_does_not_depend_on_the_order_of_the_records(hashes, share, data):
    reordered = data.draw(st.permutations(hashes))
    held_out = {int(hashes[index]) for index in split_records(as_hashes(hashes), share)[1]}
    assert {int(reordered[index]) for index in split_records(as_hashes(reordered), share)[1]} == held_out


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["random", "consecutive"])
def test_share_is_met_whatever_the_hashes_look_like(share, kind):
    count = 50_000
    hashes = np.arange(count, dtype=np.uint64)
    if kind == "random":
        hashes = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    validation = split_records(hashes, share)[1]
    assert abs(validation.size / count - share) < 5 * np.sqrt(share * (1 - share) / count)


def test_split_is_the_same_in_every_version():
    # Held-out figures of two runs compare only while this does not change.
    assert split_records(np.arange(40, dtype=np.uint64), 0.1)[1].tolist() == [1, 18, 25, 27]


def test_another_seed_holds_out_other_sequences():
    hashes = np.arange(1000, dtype=np.uint64)
    assert split_records(hashes, 0.1, seed=1)[1].tolist() != split_records(hashes, 0.1, seed=2)[1].tolist()


def test_share_of_zero_holds_out_nothing():
    training, validation = split_records(np.array([7, 7, 7], dtype=np.uint64), 0.0)
    assert training.tolist() == [0, 1, 2]
    assert validation.size == 0


def test_one_distinct_sequence_is_refused_with_what_to_change():
    with pytest.raises(DataError, match=r"3 records.*data\.validation_share to 0 or give more sequences"):
        split_records(np.array([7, 7, 7], dtype=np.uint64), 0.05)


def test_empty_store_is_refused():
    with pytest.raises(DataError, match="no sequences"):
        split_records(np.array([], dtype=np.uint64), 0.05)
