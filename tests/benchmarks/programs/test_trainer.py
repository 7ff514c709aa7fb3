"""The Trainer's groups of one length are kept, in an order that spans the lengths."""

import pytest

pytest.importorskip("accelerate")

from hypothesis import given
from hypothesis import strategies as st

from esmeray.benchmarks.programs.trainer import SpreadGroups, deepspeed_settings


@given(st.integers(1, 400), st.integers(1, 16))
def test_spread_groups_are_the_same_sequences_once_each_and_a_few_span_the_lengths(number, group):
    assert sorted(SpreadGroups(range(number), group)) == list(range(number))
    order = list(SpreadGroups(range(1000), 10))
    first_of_groups = order[::10][:6]
    assert order[:10] == list(range(10))
    assert abs(sum(first_of_groups) / 6 - 450) < 150


def test_the_peer_trains_with_the_zero_settings_of_the_project():
    settings = deepspeed_settings()
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
