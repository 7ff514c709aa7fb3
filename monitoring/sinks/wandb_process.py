"""The program that W&B lives in: a process of its own, started by :mod:`monitoring.sinks.wandb_sink`, killed when it
hangs.

Everything of wandb that can block (log-in, ``init``, ``finish``, its atexit hook, its service wandb-core) happens here,
out of reach of the run. It is started by its path, with nothing else of this project, and speaks lines of JSON:

in, on standard input
    one order ``{"settings": {...}, "config": {...}}``: keyword arguments of ``wandb.Settings``, and the run's config;
    then a row a line, ``{"position": str, "values": {...}}``, with ``"alert": {"title", "text", "level"}`` where one is
    to be sent; ``position`` names the value that grows from row to row of its stream. The end of the input ends the
    run.
out, on standard output
    ``{"state": "imported"}``, ``{"state": "ready", "folder": str}``, ``{"state": "finished", "problem": str | null}``;
    or at any point ``{"state": "failed", "reason": str}``. After "finished", the end of the output says that W&B's file
    is closed.

What wandb itself prints goes to standard error. The one argument is how many seconds the process may outlive a parent
that was killed.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

import psutil

PARENT_POLL_S = 1.0
STEP = "step"
ELAPSED = "elapsed_s"
AXES = {
    STEP: ("train/*", "validation/*", "event/*"),
    ELAPSED: ("gpu/*", "mem/*", "cpu/*", "disk/*", "net/*", "node/*", "worker/*", "perf/*", "alert/*"),
}
"""What W&B draws against which value."""
ALERT_GAP_S = 1
"""Seconds in which W&B takes alerts of one title for repeats. Those that come here were told apart already."""


def main() -> NoReturn:
    """Serve one run, then leave without wandb's atexit hook, which waits for the server."""
    orders, replies = _take_standard_streams()
    orphan_grace_s = float(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(os.getppid(), orphan_grace_s), daemon=True).start()
    try:
        _serve(orders, replies)
    except Exception as error:  # noqa: BLE001 - whatever wandb raises is told to the parent, which goes on without it
        _reply(replies, state="failed", reason=_first_line(error))
    _leave()


def _serve(orders: BinaryIO, replies: BinaryIO) -> None:
    sys.stderr = complaints = _Complaints(sys.stderr)
    import wandb  # takes seconds, which a parent that keeps this process in reserve spends before it needs it

    _reply(replies, state="imported")
    line = orders.readline()
    if not line:
        return
    order = json.loads(line)
    run = wandb.init(settings=wandb.Settings(**order["settings"]), config=order["config"])
    run.define_metric("position/*", hidden=True)
    for axis, namespaces in AXES.items():
        run.define_metric(axis, hidden=True)
        for namespace in namespaces:
            run.define_metric(namespace, step_metric=axis)
    _reply(replies, state="ready", folder=str(Path(run.dir).parent))
    known = _Known(run)
    for line in orders:
        row = json.loads(line)
        if not known.has(row["position"], row["values"]):
            run.log(row["values"])
            if "alert" in row:
                run.alert(**row["alert"], wait_duration=ALERT_GAP_S)
    run.finish()
    _reply(replies, state="finished", problem=complaints.first)
    wandb.teardown()  # wandb-core writes the rest of its file and ends


class _Complaints(io.TextIOBase):
    """Standard error that remembers the first warning: that uploads were given up, wandb says in no other way."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.first: str | None = None

    def write(self, text: str) -> int:
        """Pass ``text`` on, and remember it if it is the first warning or error."""
        found = re.search(r"(?:WARNING|ERROR) +(.+)", text)
        if found and self.first is None:
            self.first = found[1].strip()
        return self._stream.write(text)

    def flush(self) -> None:
        """Pass on."""
        self._stream.flush()

    def fileno(self) -> int:
        """The descriptor below, which child processes get."""
        return self._stream.fileno()


class _Known:
    """What the server holds of a run that it already knew: of each stream of rows, those up to a position."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._until: dict[str, float] = {}

    def has(self, position: str, values: dict[str, Any]) -> bool:
        """Whether the row is among them."""
        if position not in self._until:  # asked once, before this process adds to it
            known = self._run.summary.get(position) if self._run.resumed else None
            self._until[position] = known if isinstance(known, int | float) else -math.inf
        until = self._until[position]
        # The parent tells the run from its beginning; validation of the last known step may be new: it is repeated.
        return values[position] < until or (values[position] == until and (position != STEP or "train/loss" in values))


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, under descriptors that wandb's service doesn't inherit; 0 and 1 then lead elsewhere."""
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    return orders, replies


def _reply(replies: BinaryIO, **fields: Any) -> None:
    try:
        replies.write(json.dumps(fields).encode() + b"\n")
    except BrokenPipeError:
        print("the run that this process belonged to is gone", file=sys.stderr)


def _end_with_parent(parent: int, grace_s: float) -> None:
    """A driver that was killed closes the pipe, which ends the run in good order; a hanging wandb is cut off here."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    time.sleep(grace_s)
    _leave()


def _leave() -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(0)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


if __name__ == "__main__":
    main()
