"""Cropping keeps max_length residues, from a place that depends on seed, epoch and record alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.batches.preparation import CropCount, count_cropped, crop_starts, cropped_lengths

lengths = st.lists(st.integers(0, 40_000), min_size=1, max_size=30).map(lambda values: np.array(values, np.uint32))


@settings(deadline=None)
@given(lengths_N=lengths, max_length=st.integers(1, 2000))
def test_counts_are_what_is_left_out(lengths_N, max_length):
    counted = count_cropped(lengths_N, max_length)
    kept = cropped_lengths(lengths_N, max_length)
    assert counted == CropCount(int((lengths_N > max_length).sum()), int(lengths_N.sum()) - int(kept.sum()))


def test_every_window_is_equally_likely():
    starts_N = crop_starts(np.full(50_000, 19), 10, np.arange(50_000), seed=3, epoch=1)
    counts = np.bincount(starts_N)
    assert counts.size == 10
    assert np.abs(counts / 5000 - 1).max() < 0.08


def test_window_changes_with_epoch_and_seed_but_not_with_company():
    lengths_N, records_N = np.full(100, 5000), np.arange(100)
    starts = crop_starts(lengths_N, 100, records_N, seed=0, epoch=0)
    assert (crop_starts(lengths_N[40:], 100, records_N[40:], seed=0, epoch=0) == starts[40:]).all()
    assert (crop_starts(lengths_N, 100, records_N, seed=0, epoch=1) != starts).mean() > 0.9
    assert (crop_starts(lengths_N, 100, records_N, seed=1, epoch=0) != starts).mean() > 0.9
