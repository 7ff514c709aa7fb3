"""Stages with constant results, for tests of the benchmark runner and its pages."""

from collections.abc import Callable, Iterator

from benchmarks.harness.comparison import compare
from benchmarks.harness.machine import Machine
from benchmarks.harness.stage import Row, Setting, Stage

MACHINE = Machine(cpu="Toy", cores=2, memory_gib=1, gpu=None, gpu_memory_gib=None, system="Linux", python="3.11.0")


def toy_stage(name: str, rows: Callable[[Setting], Iterator[Row]] | None = None, ours: float = 30.0) -> Stage:
    """A stage with the value ``ours`` and a peer with the value 10, or with ``rows``."""

    def compared(setting: Setting) -> Iterator[Row]:
        setting.facts["records"] = 7
        contenders = {"ours": lambda: ours, "peer": lambda: 10.0, "limit": lambda: 60.0}
        yield from compare(setting, "first", "MB/s", contenders, floors={"peer": 2.0})

    return Stage(name, "a toy", rows or compared)
