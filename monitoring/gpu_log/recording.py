"""Recording of this machine's GPUs, whatever uses them, to a log as nvidia-smi writes it."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError, ResourceError
from monitoring.gpu_log.writer import GpuLogWriter
from monitoring.sampling.nvml import NvmlDevices


def record_gpus(
    path: Path, interval_s: float, duration_s: float | None, indices: Sequence[int], warn: Callable[[str], None]
) -> int:
    """Append a sample to ``path`` every ``interval_s`` until Ctrl-C, or ``duration_s`` have passed.

    ``indices`` are NVML's, of the GPUs to record; empty for all. Returns the number of samples. Raises ConfigError for
    an index that is not on this machine, ResourceError without a GPU, and as :class:`GpuLogWriter` does.
    """
    devices = NvmlDevices(warn)
    try:
        present = [gpu.index for gpu in devices.read()]
        if not present:
            raise ResourceError("no GPU to record: NVML sees none on this machine; `esmeray profile gpu` says why")
        if absent := sorted(set(indices) - set(present)):
            raise ConfigError(f"GPU {' '.join(map(str, absent))} is not on this machine; there are: {present}")
        return _record(path, interval_s, duration_s or math.inf, set(indices or present), devices)
    finally:
        devices.close()


def _record(path: Path, interval_s: float, duration_s: float, indices: set[int], devices: NvmlDevices) -> int:
    begin_s, samples = time.monotonic(), 0
    with GpuLogWriter(path) as log:
        try:
            while True:
                log.append(time.time(), [gpu for gpu in devices.read() if gpu.index in indices])
                samples += 1
                elapsed_s = time.monotonic() - begin_s
                due_s = (math.floor(elapsed_s / interval_s) + 1) * interval_s  # a late sample makes the next no later
                time.sleep(max(0.0, min(due_s, duration_s) - elapsed_s))
                if due_s > duration_s:
                    return samples
        except KeyboardInterrupt:
            return samples
