"""The sampler of a worker in a process that is like one: how much CPU time it takes.

In: seconds between samples, and seconds to measure. Out: one line of JSON, CPU seconds of the process ``with_s`` the
sampler and ``without_s``. A worker has threads of Ray and torch, over which the sampler looks for child processes,
and loader processes; this one has as many, all asleep.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from monitoring.sampling.sampler import Sampler

THREADS, CHILDREN = 60, 2
_STEP = {"loss": 2.5, "tokens_per_s": 1e4, "step_s": 1.0, "forward_s": 0.3, "backward_s": 0.6, "data_wait_s": 0.01}


def main(interval_s: float, seconds: float) -> dict[str, float]:
    """Measure with the sampler, then without."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    children = [
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        for _ in range(CHILDREN)
    ]
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "worker-00000.jsonl"
            sampler = Sampler(
                file, worker=0, device=device, node=True, interval_s=interval_s, prometheus=False, warn=print_error
            )
            sampler.note(1, 0, _STEP)
            sampler.sample()  # what is done once (finding GPUs, say) is no part of it
            with_s = _cpu_seconds(seconds, sampler)
            without_s = _cpu_seconds(seconds, None)
    finally:
        ended.set()
        for child in children:
            child.communicate()
    return {"with_s": with_s, "without_s": without_s}


def print_error(message: str) -> None:
    """Show a warning of the sampler."""
    print(message, file=sys.stderr)


def _cpu_seconds(seconds: float, sampler: Sampler | None) -> float:
    """CPU time of this process while it sleeps so long."""
    before_s = time.process_time()
    if sampler is not None:
        sampler.start()
    time.sleep(seconds)
    if sampler is not None:
        sampler.close()
    return time.process_time() - before_s


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), float(sys.argv[2]))))
