"""Programs in processes of their own: their peak memory, and how they fail."""

import sys

import pytest

from benchmarks.programs.processes import MemoryMeter, Peak, call, run_program

pytestmark = pytest.mark.slow

MEGABYTE = 2**20
ALLOCATE = "tests.benchmarks.programs.test_processes:allocate"


def allocate(before: int, during: int) -> Peak:
    """Take and give back memory before and during the work."""
    meter = MemoryMeter()
    bytearray(b"x" * before)
    meter.work_begins()
    bytearray(b"x" * during)
    return meter.peak()


def test_the_peak_of_the_work_counts_and_that_of_setting_up_does_not():
    peak = Peak(*call(ALLOCATE, before=300 * MEGABYTE, during=50 * MEGABYTE))
    assert 50 * MEGABYTE <= peak.computing_bytes < 200 * MEGABYTE
    assert peak.total_bytes > peak.computing_bytes


def test_a_program_that_fails_is_reported_with_the_end_of_its_output():
    with pytest.raises(RuntimeError, match="ended with code 7: last words"):
        run_program([sys.executable, "-c", "print('last words'); raise SystemExit(7)"])
