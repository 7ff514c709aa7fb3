"""What a store of some size costs a process that has done nothing else: converting into it, and training from it.

In: a FASTA file or a store. Out: MB and seconds, measured in fresh processes (:mod:`benchmarks.fresh_process`). The
resident set counts pages of the memory-mapped store. Of what the process holds for itself (``RssAnon`` of
/proc/self/status) Linux keeps no peak, so a thread looks at it every millisecond.
"""

from __future__ import annotations

import json
import threading
import time
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.fresh_process import Meter, peak_of

_INTERVAL_S = 0.001


class Probes:
    """Processes that train from one store for a moment; each gives a value of every name."""

    def __init__(self, store: Path, batches: int, report: Path) -> None:
        """Start nothing yet.

        Args:
            store: to open, plan and load from.
            batches: to load.
            report: a file for what the process measured, written and removed.
        """
        self._arguments = {"store": str(store), "batches": batches, "report": str(report)}
        self._report = report
        self._found: list[dict[str, float]] = []
        self._taken: dict[str, int] = {}

    def value(self, name: str) -> float:
        """The next value of this name: its n-th comes from the n-th process, so that names share processes."""
        number = self._taken.get(name, 0)
        self._taken[name] = number + 1
        if number == len(self._found):
            self._found.append(self._probe())
        return self._found[number][name]

    def _probe(self) -> dict[str, float]:
        from benchmarks.growth import RESIDENT

        peak = peak_of("benchmarks.growth_process:load_measured", self._arguments)
        found = json.loads(self._report.read_text(encoding="utf-8"))
        self._report.unlink()
        return {RESIDENT: peak.host_bytes / 1e6, **found}


def convert_in_process(fasta: Path, store: Path) -> float:
    """Make a store; the peak of the process that did it in MB, libraries left out."""
    arguments = {"fasta": str(fasta), "store": str(store)}
    return peak_of("benchmarks.growth_process:convert_measured", arguments).host_bytes / 1e6


def convert_measured(meter: Meter, fasta: str, store: str) -> None:
    """The conversion, in its process."""
    from dataset.store.conversion import convert
    from train_config.schema import IngestSection

    meter.libraries_loaded()
    meter.work_begins()
    convert([fasta], Path(store), IngestSection())


def load_measured(meter: Meter, store: str, batches: int, report: str) -> None:
    """Open, plan and load, in its process."""
    import numpy as np

    from benchmarks.growth import LOADED_TOKENS, OPENING, OWN, PLANNING
    from dataset.batches.loader import TrainingBatches
    from dataset.store.format import read_manifest
    from train_config.schema import BatchSection, DataSection, MaskedLMSection

    records = read_manifest(Path(store)).num_records
    meter.libraries_loaded()
    meter.work_begins()
    with _OwnMemory() as own:
        start_s = time.perf_counter()
        loader = TrainingBatches(
            store,
            np.arange(records),
            data=DataSection(num_workers=0),
            batch=BatchSection(tokens=LOADED_TOKENS, global_tokens=LOADED_TOKENS),
            masked_lm=MaskedLMSection(),
            seed=0,
        )
        opened_s = time.perf_counter()
        loader.plan(0)
        planned_s = time.perf_counter()
        for _ in islice(loader.epoch(0), batches):
            pass
    found = {OWN: own.most_bytes / 1e6, OPENING: opened_s - start_s, PLANNING: planned_s - opened_s}
    Path(report).write_text(json.dumps(found), encoding="utf-8")


class _OwnMemory:
    """The most anonymous memory within the block, above what there was at its start."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._start_bytes = _anonymous_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, _anonymous_bytes() - self._start_bytes)
            if self._end.wait(_INTERVAL_S):
                return


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: memory can be measured on Linux only")
