"""Metrics to Weights & Biases, isolated so that W&B can neither stop nor slow a run.

The driver starts :mod:`esmeray.monitoring.sinks.wandb_follower`, and at the end waits for it for at most
``wandb.finish_timeout_s`` plus :data:`MARGIN_S`. Whatever W&B does, the run's folder has all values. If W&B fails, one
warning says so, with the command to upload them.
"""

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil

from esmeray.installation import python_path
from esmeray.monitoring.section import WandbSection
from esmeray.run_folder.paths import RunFolder

MARGIN_S = 10.0
"""Extra seconds for a follower to exit after its own timeout."""
PROGRAM = "esmeray.monitoring.sinks.wandb_follower"
_TIED = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_MODE", "WANDB_DIR")
"""Variables of another wandb run that this process may belong to."""


class WandbFollowers:
    """W&B processes of one run: one, or one per worker (``wandb.runs``).

    ``warn`` is called at most once, with the warning.
    """

    def __init__(self, section: WandbSection, run: RunFolder, workers: int, warn: Callable[[str], None]) -> None:
        self._section, self._run, self._warn = section, run, warn
        self._warned = threading.Lock()  # acquired by the first to warn
        self._followers: list[tuple[threading.Thread, subprocess.Popen[bytes]]] = []
        if section.mode == "disabled":
            return
        for arguments in [[]] if section.runs == "one" else [["--worker", str(worker)] for worker in range(workers)]:
            self._start(arguments)

    def close(self, timeout_s: float = math.inf) -> None:
        """Signal the end of the run and wait as described in the module, at most ``timeout_s``.

        No process is left behind.
        """
        for _, process in self._followers:
            assert process.stdin is not None
            process.stdin.close()  # close all before waiting for one: they end in parallel
        # Offline: time for Python to import wandb and write its file, on a loaded machine.
        limit_s = 60.0 if self._section.mode == "offline" else self._section.finish_timeout_s
        for thread, process in self._followers:
            thread.join(min(limit_s + MARGIN_S, timeout_s))
            if thread.is_alive():  # wandb's own service too, a child that keeps the pipe open
                with contextlib.suppress(psutil.NoSuchProcess):
                    parent = psutil.Process(process.pid)
                    for member in [*parent.children(recursive=True), parent]:
                        member.kill()
                thread.join()

    def _start(self, arguments: list[str]) -> None:
        try:
            self._run.logs.mkdir(parents=True, exist_ok=True)
            with (self._run.logs / "wandb.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(self._run.path), "--follow", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # PYTHONSAFEPATH: -m would put the current folder, the run's, first on the path.
                    # WANDB_ERROR_REPORTING: no error reports to W&B's developers.
                    env={
                        **{name: value for name, value in os.environ.items() if name not in _TIED},
                        "PYTHONPATH": python_path(),
                        "PYTHONSAFEPATH": "1",
                        "WANDB_ERROR_REPORTING": "false",
                    },
                    cwd=self._run.path,
                    # Ctrl-C in the terminal goes to the driver only, which then ends this process in order
                    start_new_session=True,
                )
        except OSError as error:
            self._report(str(error))
            return
        thread = threading.Thread(target=self._wait, args=(process,), name="wandb-follower", daemon=True)
        self._followers.append((thread, process))
        thread.start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a follower to end, then report what went wrong."""
        assert process.stdout is not None
        with process.stdout:
            problem = process.stdout.read().decode(errors="replace").strip()
        if process.wait() != 0 or problem:
            self._report(problem or f"its process ended with code {process.returncode}")

    def _report(self, problem: str) -> None:
        if self._warned.acquire(blocking=False):  # never released: one warning is enough
            path = self._run.path
            self._warn(
                f"W&B: {problem}; {path} has all values; to upload them, run 'python -m {PROGRAM} {path} --mode online'"
            )
