"""Splits by a hash of the sequence keep duplicates together, are stable, and have two non-empty sides if possible.

In a stratified split, each class with two sequences is on both sides.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.batches.random_bits import split_clusters, split_records, split_stratified

shares = st.floats(0.001, 0.999)


def as_hashes(values) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


one_class_each = st.dictionaries(st.integers(0, 2**64 - 1), st.integers(0, 5), min_size=2, max_size=60)


@settings(deadline=None, max_examples=50)
@given(class_of=one_class_each, copies=st.integers(1, 4), share=shares)
def test_every_record_is_on_one_of_two_sides_and_duplicates_on_the_same(class_of, copies, share):
    hashes = as_hashes([*class_of] * copies)
    splits = [split_records(hashes, share)]
    if len(class_of) > len(set(class_of.values())):  # a class has two sequences
        splits.append(split_stratified(hashes, np.array([*class_of.values()] * copies), share))
    for training, validation in splits:
        assert sorted([*training, *validation]) == list(range(len(hashes)))
        assert training.size and validation.size
        assert not set(hashes[training].tolist()) & set(hashes[validation].tolist())


@settings(deadline=None, max_examples=50)
@given(hashes=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60, unique=True), share=shares, data=st.data())
def test_split_does_not_depend_on_the_order_of_the_records(hashes, share, data):
    reordered = data.draw(st.permutations(hashes))
    held_out = {int(hashes[index]) for index in split_records(as_hashes(hashes), share)[1]}
    assert {int(reordered[index]) for index in split_records(as_hashes(reordered), share)[1]} == held_out


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_share_is_met_whatever_the_hashes_look_like(share):
    validation = split_records(np.arange(50_000, dtype=np.uint64), share)[1]
    assert abs(validation.size / 50_000 - share) < 5 * np.sqrt(share * (1 - share) / 50_000)


def test_split_is_the_same_in_every_version():
    # Held-out metrics of two runs are comparable only as long as this split stays the same.
    assert split_records(np.arange(40, dtype=np.uint64), 0.1)[1].tolist() == [1, 18, 25, 27]


def test_share_of_zero_holds_out_nothing():
    hashes = as_hashes([7, 7, 7])
    for training, validation in (split_records(hashes, 0.0), split_stratified(hashes, np.zeros(3, int), 0.0)):
        assert (training.tolist(), validation.tolist()) == ([0, 1, 2], [])


def test_one_distinct_sequence_is_refused_with_what_to_change():
    with pytest.raises(DataError, match=r"3 records.*data\.validation_share to 0, or add sequences"):
        split_records(np.array([7, 7, 7], dtype=np.uint64), 0.05)


@settings(deadline=None, max_examples=50)
@given(records=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=60), share=shares)
def test_each_class_with_two_sequences_is_on_both_sides(records, share):
    hashes, classes = as_hashes([number for number, _ in records]), np.array([label for _, label in records])
    distinct = {label: len(set(hashes[classes == label].tolist())) for label in set(classes.tolist())}
    if max(distinct.values()) < 2:
        return
    training, validation = split_stratified(hashes, classes, share)
    assert set(classes[training].tolist()) == set(distinct)
    assert set(classes[validation].tolist()) >= {label for label, number in distinct.items() if number > 1}


def test_each_class_gives_its_share():
    hashes = np.arange(1100, dtype=np.uint64)
    classes = np.repeat([0, 1], [1000, 100])
    _, validation = split_stratified(hashes, classes, 0.1)
    assert np.bincount(classes[validation]).tolist() == [100, 10]


def test_a_sequence_of_two_classes_stays_on_one_side_where_it_can():
    # Sequence 0 has both labels; each class has other sequences for both sides.
    classes = np.array([0, 1, *[0] * 20, *[1] * 20])
    for first in range(0, 820, 41):
        hashes = as_hashes([first, first, *range(first + 1, first + 41)])
        training, _ = split_stratified(hashes, classes, 0.5)
        assert (0 in training) == (1 in training)


@settings(deadline=None, max_examples=50)
@given(
    records=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=2, max_size=60),
    share=shares,
    data=st.data(),
)
def test_whole_clusters_are_held_out_in_any_order_and_leave_each_class_in_training(records, share, data):
    clusters, classes = np.array(records).T
    classes = np.unique(classes, return_inverse=True)[1]
    hashes = as_hashes(range(len(records)))
    try:
        held_out = split_clusters(clusters, hashes, classes, share)
    except DataError as error:
        assert "raise data.validation_share or data.labels.identity" in str(error)
        return
    is_held_out = np.isin(np.arange(len(records)), held_out)
    assert held_out.size and not {*clusters[is_held_out]} & {*clusters[~is_held_out]}
    assert {*classes} == {*classes[~is_held_out]}
    order = np.array(data.draw(st.permutations(range(len(records)))))
    assert {*order[split_clusters(clusters[order], hashes[order], classes[order], share)]} == {*held_out.tolist()}


def test_clusters_give_each_class_its_share_of_records():
    sizes = np.random.default_rng(0).geometric(0.2, 800)
    clusters = np.repeat(np.arange(800), sizes)
    classes = clusters % 4
    held_out = split_clusters(clusters, as_hashes(range(clusters.size)), classes, 0.2)
    assert np.bincount(classes[held_out]) / np.bincount(classes) == pytest.approx(0.2, abs=0.01)
    assert split_clusters(clusters, as_hashes(range(clusters.size)), classes, 0.0).size == 0
