"""Batches of labelled records contain each record's tokens, its special tokens and its targets."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.batches.loader import LabelledSource, Labels
from esmeray.dataset.batches.steps import TrainingSteps
from esmeray.dataset.packed_batch import TARGETS, WEIGHTS
from esmeray.dataset.section import BatchSection
from esmeray.dataset.targets import IGNORED_TARGET

BATCH = BatchSection(tokens=64, global_tokens=128)
NO_LABELS = Labels(np.zeros(1, dtype=np.int64))


class Tokens:
    """A token store in memory; record r has the tokens r, r + 1, ..."""

    manifest = SimpleNamespace(prefix=(1,), suffix=(2, 3), pad=0, vocabulary_size=1000)

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, dtype=np.uint32)

    def piece(self, record, start, length):
        return np.arange(record + start, record + start + length, dtype=np.uint16) + 10


def whole(tokens: Tokens, record: int) -> list[int]:
    return [1, *tokens.piece(record, 0, int(tokens.lengths[record])).tolist(), 2, 3]


def sequences(batch) -> list[list[int]]:
    return [part.tolist() for part in batch.tokens.split(torch.diff(batch.cu_seqlens).tolist())]


def source(tokens, labels=NO_LABELS, max_length=40, crop="start", **others) -> LabelledSource:
    return LabelledSource(tokens, labels, max_length=max_length, crop=crop, **others)


@settings(deadline=None, max_examples=20)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), world_size=st.integers(1, 3))
def test_an_epoch_holds_each_record_once_whole_and_with_its_own_label(lengths, world_size):
    tokens, records = Tokens(lengths), np.arange(len(lengths))
    labels = Labels(records % 7, weights=records.astype(np.float32))
    seen = []
    ranks = [
        TrainingSteps(source(tokens, labels), records, batch=BATCH, seed=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in chain.from_iterable(rank.epoch(0) for rank in ranks):
        for batch in (batch for batch in step if batch.records.numel()):  # without fillers
            assert batch.named(TARGETS).tolist() == [record % 7 for record in batch.records.tolist()]
            assert batch.named(WEIGHTS).tolist() == batch.records.tolist()
            assert sequences(batch) == [whole(tokens, record) for record in batch.records.tolist()]
            seen += batch.records.tolist()
        assert step.num_targets == sum(batch.records.numel() for batch in step)
    assert sorted(seen) == records.tolist()


@pytest.mark.parametrize(("crop", "expected"), [("start", [10, 11, 12, 13, 14]), ("ends", [10, 11, 12, 28, 29])])
def test_a_longer_record_is_cropped_as_the_setting_says(crop, expected):
    made = next(source(Tokens([20]), max_length=5, crop=crop).batches([(0, np.array([0]))]))
    assert sequences(made.batch) == [[1, *expected, 2, 3]]
    assert made.batch.positions.tolist() == list(range(8))


def test_random_windows_differ_by_epoch_and_stay_inside():
    cropped = source(Tokens([200]), max_length=5, crop="random", seed=1)
    windows = [sequences(made.batch)[0][1:-2] for made in cropped.batches((e, np.array([0])) for e in range(20))]
    assert all(window == list(range(window[0], window[0] + 5)) for window in windows)
    assert all(10 <= window[0] <= 205 for window in windows)
    assert len({window[0] for window in windows}) > 10


@pytest.mark.parametrize("crop", ["start", "ends"])
def test_labels_of_residues_follow_their_residues_through_the_crop(crop):
    lengths = [4, 12]
    labels = Labels(np.arange(16), per_residue=True)
    made = next(source(Tokens(lengths), labels, max_length=6, crop=crop).batches([(0, np.array([1, 0]))]))
    inner = [4, 5, 6, 7, 8, 9] if crop == "start" else [4, 5, 6, 13, 14, 15]
    ignored = IGNORED_TARGET
    targets = made.batch.by_token[TARGETS].tolist()
    assert targets == [ignored, *inner, ignored, ignored, ignored, 0, 1, 2, 3, ignored, ignored]
    assert made.num_targets == 10
