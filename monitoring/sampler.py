"""The thread that looks at a worker, and on one worker of each machine at the machine and its GPUs, while it trains.

In: an interval, and what the loop says of its last step (:meth:`Sampler.note`). Out: a line a sample in
``<run>/monitoring/worker-00000.jsonl``. What the figures are called is in :mod:`monitoring.metric_names`; where they go
from the file (W&B, alerts, pictures) is left to those who follow it.

A sample has a ``kind`` ("sample"), the ``step`` and ``epoch`` last noted, a ``time`` (Unix seconds), the ``host``, the
``worker``, and ``figures``: what could be read, by name. Nothing here raises into the run or waits for a GPU: what goes
wrong is one warning.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

from monitoring.metrics_log import encode_record

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0
"""Seconds that close() waits for a sample in progress; a driver that hangs must not hold up the end of a run."""


class Sampler:
    """A daemon thread that samples every so often and appends to a file of this worker's own.

    Args:
        path: the file; made, with its folder, if absent, else appended to.
        worker: rank of the worker.
        device: what it computes on.
        node: also look at the machine and all its GPUs: one worker of each machine does.
        interval_s: seconds between samples.
        prometheus: also export the figures through Ray, where it runs.
        warn: called with one line where something can't be read or written, once for each cause. From the thread.
        flops_per_token: of forward and backward pass, to tell the model FLOPs utilisation; None leaves it out.
        peak_tflops: of one device; None for what is known of this GPU in this precision.
        amp_dtype: ``training.amp_dtype``.
        tf32: ``training.tf32``.
        world_size: workers, one a device.
        clock: Unix seconds; for tests.
    """

    def __init__(
        self,
        path: Path,
        *,
        worker: int,
        device: torch.device,
        node: bool,
        interval_s: float,
        prometheus: bool,
        warn: Callable[[str], None],
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        amp_dtype: str = "bf16",
        tf32: bool = True,
        world_size: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._worker = worker
        self._device = device
        self._interval_s = interval_s
        self._warn = warn
        self._clock = clock
        self._host = socket.gethostname()
        self._noted: tuple[int, int, dict[str, float]] = (0, 0, {})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        self._process = psutil.Process()

    def start(self) -> Sampler:
        """Begin: the first sample at once."""
        self._thread.start()
        return self

    def note(self, step: int, epoch: int, figures: Mapping[str, float]) -> None:
        """Take what the loop says of its last logged step: ``tokens_per_s``, ``loss``, ``forward_s`` ... Costs nothing."""
        self._noted = (step, epoch, dict(figures))

    def new_epoch(self) -> None:
        """Peaks begin anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Take a last sample and end. Never raises; may be called again."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def _work(self) -> None:
        while True:
            last = self._closing.is_set()
            try:
                self.sample()
            except Exception as error:
                logger.debug("sample failed", exc_info=error)
            if last:
                return
            self._closing.wait(self._interval_s)

    def sample(self) -> None:
        """Look once, now."""
        step, epoch, noted = self._noted
        figures = {f"worker/{self._worker}/{name}": value for name, value in noted.items()}
        figures[f"worker/{self._worker}/rss_bytes"] = float(self._process.memory_info().rss)
        record = {
            "kind": "sample",
            "step": step,
            "epoch": epoch,
            "time": self._clock(),
            "host": self._host,
            "worker": self._worker,
            "figures": figures,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, encode_record(record))
        finally:
            os.close(descriptor)
