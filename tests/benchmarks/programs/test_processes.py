"""Programs in child processes: peak memory, and errors."""

import pytest

from benchmarks.programs.processes import call, peak_memory

pytestmark = pytest.mark.slow

MEGABYTE = 2**20
PROGRAM = "tests.benchmarks.programs.test_processes"


def allocate(before: int, during: int) -> int:
    """Allocate and free memory before and during the work; return the work's peak memory."""
    bytearray(b"x" * before)
    peak_bytes = peak_memory()
    bytearray(b"x" * during)
    return peak_bytes()


def fail() -> None:
    print("last words")
    raise SystemExit(7)


def test_the_peak_of_the_work_counts_and_the_peak_before_does_not():
    peak_bytes = call(f"{PROGRAM}:allocate", before=300 * MEGABYTE, during=50 * MEGABYTE)
    assert 50 * MEGABYTE <= peak_bytes < 200 * MEGABYTE


def test_a_program_that_fails_is_reported_with_the_end_of_its_output():
    with pytest.raises(RuntimeError, match="ended with code 7: last words"):
        call(f"{PROGRAM}:fail")
