"""Stages that measure nothing, for tests of what is done with measurements."""

from collections.abc import Callable, Iterator

from benchmarks.harness.comparison import compare
from benchmarks.harness.machine import Machine
from benchmarks.harness.stage import Row, Setting, Stage

MACHINE = Machine(cpu="Toy", cores=2, memory_gib=1, gpu=None, gpu_memory_gib=None, system="Linux", python="3.11.0")


def toy_stage(name: str, rows: Callable[[Setting], Iterator[Row]] | None = None, ours: float = 30.0) -> Stage:
    """Compare ours with a peer of 10, unless other rows are given."""

    def compared(setting: Setting) -> Iterator[Row]:
        setting.facts["records"] = 7
        contenders = {"ours": lambda: ours, "peer": lambda: 10.0, "limit": lambda: 60.0}
        yield from compare(setting, "first", "MB/s", contenders, floors={"peer": 2.0})

    return Stage(name, "a toy", rows or compared)
