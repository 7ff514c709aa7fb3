"""Numbers in words."""

from __future__ import annotations

import pytest

from common.text import amount, duration


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (60, "1:00"), (3725, "1:02:05"), (200_000, "2 d 7 h")]
)
def test_durations_are_short(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(("value", "words"), [(0, "0"), (999, "999"), (12_345, "12.3k"), (999_960, "1.00M")])
def test_amounts_are_short(value, words):
    assert amount(value) == words
