"""The faults: their phases, the process, disk or network that they hit, and how they end."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clusters import Machines, Restore

STEPPING = ("forward", "reduction", "update")
SAVING = ("checkpoint", "publishing")
ALL = ("loader", *STEPPING, *SAVING, "export", "embedding")
PHASES = (*ALL, "resize", "search", "service")


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        what: target of the fault: worker, driver, machines or checkpoint; or act.
        how: for a worker or driver, a signal; for machines, a function that may return the call that ends the fault;
            for a checkpoint, a function of its largest file; for act, a name in ACTS of tests/chaos/observed.py.
        phases: phases in which the fault is inflicted.
        settings: name in SETTINGS of tests/chaos/rounds.py.
        lasts_s: seconds until the fault ends.
    """

    what: str
    how: Any
    phases: tuple[str, ...]
    settings: str = "usual"
    lasts_s: float = 5.0

    def inflict(self, machines: Machines, driver: subprocess.Popen[bytes], pid: int, checkpoints: Path) -> Restore:
        if self.what in ("worker", "driver"):
            with suppress(ProcessLookupError):  # the process has just ended
                os.kill(pid if self.what == "worker" else driver.pid, self.how)
        elif self.what == "machines":
            return self.how(machines)
        elif self.what == "checkpoint":
            driver.kill()
            files = [path for path in max(checkpoints.glob("step-????????")).rglob("*") if path.is_file()]
            self.how(max(files, key=lambda path: path.stat().st_size))
        return None


FAULTS = {
    "worker SIGKILL": Fault("worker", signal.SIGKILL, (*ALL, "service")),
    "worker abort": Fault("worker", signal.SIGABRT, (*STEPPING, "embedding", "service")),
    "worker segfault": Fault("worker", signal.SIGSEGV, (*STEPPING, "checkpoint", "service")),
    "worker SIGSTOP": Fault("worker", signal.SIGSTOP, (*STEPPING, "publishing")),
    "driver SIGKILL": Fault("driver", signal.SIGKILL, (*ALL, "search")),
    "driver SIGTERM": Fault("driver", signal.SIGTERM, (*ALL, "search")),
    "GIL held": Fault("act", "hold the GIL", ("forward", "update")),
    "asynchronous exception": Fault("act", "raise", (*STEPPING, "checkpoint")),
    "slow rank": Fault("act", "be slow", ("forward",)),
    "clock +1 h": Fault("act", "clock forward", ("forward", "checkpoint")),
    "clock -1 h": Fault("act", "clock back", ("update", "checkpoint")),
    "disk slow": Fault("act", "slow disk", ("update",)),
    "W&B away": Fault("act", "wait", ("forward",), "W&B away"),
    "raylet SIGKILL": Fault(
        "machines", lambda m: m.kill("raylet", 1), ("forward", "checkpoint", "embedding", "search")
    ),
    "GCS SIGKILL": Fault(
        "machines", lambda m: m.kill("gcs_server", 0), ("update", "publishing", "embedding", "search")
    ),
    "node lost": Fault("machines", lambda m: m.kill("", 1), (*ALL, "search", "service")),
    "node lost, fewer workers": Fault("machines", lambda m: m.kill("", 1), (*STEPPING, *SAVING), "elastic"),
    "node taken away": Fault("machines", Machines.take_away, STEPPING, "elastic", lasts_s=20),
    "worker SIGKILL in a resize": Fault("worker", signal.SIGKILL, ("resize",), "elastic"),
    "network cut": Fault("machines", Machines.cut, ("reduction", "publishing"), lasts_s=30),
    "disk full": Fault("machines", Machines.fill, ("update", *SAVING, "export", "embedding", "search")),
    "disk read-only": Fault("machines", Machines.protect, (*SAVING, "export", "embedding")),
    "shard damaged": Fault("checkpoint", lambda p: p.write_bytes(p.read_bytes()[:-99] + bytes(99)), ("update",)),
    "shard truncated": Fault("checkpoint", lambda p: os.truncate(p, p.stat().st_size // 2), ("update",)),
    "shard missing": Fault("checkpoint", Path.unlink, ("update",)),
}
