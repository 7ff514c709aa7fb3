"""What observes a worker and changes no result: its log, its sampler, its watchdog; and what the driver asks of it.

In: the run's folder and the worker's rank. Out: records in the run's folder, requests as a yes or no.
"""

import logging
import os
from pathlib import Path

from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.monitoring.sampling.sampler import Sampler
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.run_folder.metrics_log import MetricsLog, Record, read_metrics
from esmeray.run_folder.paths import RunFolder
from esmeray.training.engine.watchdog import Watchdog

logger = logging.getLogger(__name__)


class Observers:
    """Observers of one worker. Sampler, meter and watchdog join when there is something to observe.

    ``step`` is the number of steps taken, at which threads beside the loop log; ``hung`` holds the stacks of an attempt
    that a watchdog ended.
    """

    def __init__(self, run: RunFolder, rank: int) -> None:
        self.run, self.rank = run, rank
        self.step = 0
        # One writer: workers of other nodes may not see the folder, and lines of several would mix.
        self.log = MetricsLog(run.metrics if rank == 0 else os.devnull)
        self.sampler: Sampler | None = None
        self.meter: MemoryMeter | None = None
        # Without a limit until the worker is built: features of a frozen backbone, say, may take hours.
        self.watchdog = Watchdog(run.logs, rank, None)
        self.hung: Path | None = None

    def warn(self, message: str) -> None:
        logger.warning(message)
        self.log.event("warning", self.step, message=message)

    def note_checkpoint(self, folder: CheckpointFolder) -> None:
        # At its own step: written in the background, it is complete when the loop is further.
        self.log.event("checkpoint", folder.step, checkpoint=folder.path.name)

    def records(self) -> list[Record]:
        """The log so far on worker 0, which alone has it; none on the others."""
        return read_metrics(self.run.metrics) if self.rank == 0 and self.run.metrics.exists() else []

    def end_requested(self) -> bool:
        """True on worker 0 where the driver asked for an end; the agreement before a step shares it."""
        self.watchdog.progress()
        return self.rank == 0 and self.run.end_requested()

    def stop_requested(self) -> bool:
        """The same for an end that can't wait for an evaluation, which is not taken again: asked before its batches."""
        self.watchdog.progress()
        return self.rank == 0 and self.run.stop_requested()

    def forget_peak(self) -> None:
        """Keep the memory of an evaluation or a checkpoint from counting as a step's."""
        if self.meter is not None:
            self.meter.forget_peak()

    def close(self) -> None:
        """End sampler and watchdog, not the log: how the run ends is still to be logged. May be called again."""
        if self.sampler is not None:
            self.sampler.close()
        self.watchdog.close()
