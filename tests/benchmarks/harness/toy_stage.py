"""Stages that measure nothing, for tests of what is done with measurements."""

from collections.abc import Callable, Iterator

from benchmarks.harness.machine import Machine
from benchmarks.harness.stage import Case, Comparison, Contender, Reference, Row, Setting, Stage

MACHINE = Machine(cpu="Toy", cores=2, memory_gib=1, gpu=None, gpu_memory_gib=None, system="Linux", python="3.11.0")


def constant(name: str, value: float) -> Contender:
    """Measures the same each time."""
    return Contender(name, lambda: value, kind="value")


def toy_stage(name: str, cases: Callable[[Setting], Iterator[Case | Row]] | None = None, ours: float = 30.0) -> Stage:
    """Ours beside a peer of 10, and beside the number 20; by default with two cases, the second without the peer."""

    def two_cases(_: Setting) -> Iterator[Case]:
        yield Case("first", "MB/s", (constant("ours", ours), constant("peer", 10.0)), facts={"records": 7})
        yield Case("second", "MB/s", (constant("ours", ours),), rounds=2)

    comparisons = (
        Comparison("first", "ours", "peer", {"cpu": 2.0}),
        Comparison("first", "ours", Reference("20 MB/s", 20.0), {"cuda": 1.0}),
        Comparison("first", "ours", "a peer of other devices"),
        Comparison("second", "ours", "peer"),
    )
    return Stage(name, "a toy", cases or two_cases, comparisons)
