"""Memory of a process of its own."""

from __future__ import annotations

import pytest

from benchmarks.programs.fresh_process import Meter, peak_of

MEGABYTE = 2**20


def allocate(meter: Meter, before: int, during: int) -> None:
    """Take and give back memory before and during the work."""
    meter.libraries_loaded()
    bytearray(b"x" * before)
    meter.work_begins()
    bytearray(b"x" * during)


def test_the_peak_of_the_work_counts_and_that_of_setting_up_does_not():
    name = "tests.benchmarks.programs.test_fresh_process:allocate"
    peak = peak_of(name, {"before": 300 * MEGABYTE, "during": 50 * MEGABYTE})
    assert 50 * MEGABYTE <= peak.host_bytes < 200 * MEGABYTE
    assert peak.total_bytes > peak.host_bytes
    assert peak.device_bytes == 0


def test_work_that_fails_is_told_with_its_last_words():
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'nonsense'"):
        peak_of("tests.benchmarks.programs.test_fresh_process:allocate", {"nonsense": 1})
