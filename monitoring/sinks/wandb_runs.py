"""Which W&B runs a run has: one that holds the figures of all workers, or one for each worker.

In: what a :class:`~monitoring.sinks.wandb_sink.WandbSink` takes. Out: a sink. Of one for each worker, worker 0's holds
the loop's records and the alerts as well; all are in one group, named like the run where ``wandb.group`` names none.
Each costs a process on the driver's machine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monitoring.sinks.wandb_names import WandbRows
from monitoring.sinks.wandb_sink import WandbSink
from monitoring.watch.run_watcher import Sink
from run_folder.metrics_log import Record
from train_config.schema import WandbSection

logger = logging.getLogger(__name__)


def open_wandb(
    section: WandbSection,
    run_id: str,
    run_name: str,
    run_folder: Path | str,
    config: Mapping[str, Any],
    warn: Callable[[str], None] = logger.warning,
) -> Sink:
    """The sink that ``wandb.runs`` asks for, with the arguments of ``WandbSink``."""
    kind = WandbSink if section.runs == "one" else WandbRunPerWorker
    return kind(section, run_id, run_name, run_folder, config, warn)


class WandbRunPerWorker:
    """A W&B run for each worker, begun with its first sample; worker 0's at once. Arguments: those of ``WandbSink``."""

    live = False

    def __init__(
        self,
        section: WandbSection,
        run_id: str,
        run_name: str,
        run_folder: Path | str,
        config: Mapping[str, Any],
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._section = section.model_copy(update={"group": section.group or run_name})
        self._run = (run_id, run_name)
        self._rest = (run_folder, config, warn)
        self._rows = WandbRows(alerts_from_s=time.time(), name_nodes=False)  # of all, so that their axes begin alike
        self._sinks = {0: self._open(0)}

    def write(self, record: Record) -> None:
        """Take one record; returns at once."""
        worker = record["worker"] if record["kind"] == "sample" else 0
        if worker not in self._sinks:
            self._sinks[worker] = self._open(worker)
        self._sinks[worker].write(record)

    def close(self) -> None:
        """End the runs, together: it takes no longer than for one."""
        threads = [threading.Thread(target=sink.close) for sink in self._sinks.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _open(self, worker: int) -> WandbSink:
        run_id, run_name = self._run
        if worker:
            run_id, run_name = f"{run_id}-{worker}", f"{run_name}-worker-{worker}"
        return WandbSink(self._section, run_id, run_name, *self._rest, self._rows)
