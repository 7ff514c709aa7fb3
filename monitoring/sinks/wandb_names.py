"""Rows of W&B's history made of a run's records, for :mod:`monitoring.sinks.wandb_follower`.

Records of the loop have the step as their axis. Samples and alerts have the time: they continue while no step does, and
a resumed run repeats steps but no moment. W&B's own clock is set to the moment of the record as well: a history that is
uploaded later would else be shown as if it happened then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from run_folder.metrics_log import Record

ELAPSED = "elapsed_s"
"""Seconds since the run's first record: the axis of samples and alerts."""
POSITION = "position"
"""Namespace of what tells how far the server has each stream of rows."""
NODE_NAMESPACES = ("gpu/", "mem/", "cpu/", "disk/", "net/")
"""Metrics of a machine, not of a worker."""
AXES = {
    "step": ("train/*", "validation/*", "event/*"),
    ELAPSED: (*(f"{name}*" for name in NODE_NAMESPACES), "node/*", "worker/*", "perf/*", "alert/*"),
}
"""W&B's x axis of each namespace."""


@dataclass(frozen=True)
class Row:
    """One row of W&B's history.

    ``position`` names the value that grows with each row of this stream: by it those that the server has are known.
    ``alert`` holds ``title``, ``text`` and ``level`` of an alert to send with the row.
    """

    position: str
    values: dict[str, Any]
    alert: dict[str, str] | None = None


class WandbRows:
    """Makes rows of records.

    Args:
        alerts_from_s: Unix seconds; alerts before are history: shown, and not sent again.
        name_nodes: put the name of its node before the values of every node but worker 0's.
    """

    def __init__(self, alerts_from_s: float, name_nodes: bool) -> None:
        self._alerts_from_s = alerts_from_s
        self._name_nodes = name_nodes
        self._began_s: float | None = None

    def row(self, record: Record) -> Row:
        """The row of a record. The first one's time is the zero of the axis of time."""
        time_s = float(record.get("time") or 0.0)
        if self._began_s is None:
            self._began_s = time_s
        if record["kind"] not in ("sample", "alert"):
            return Row("step", {"_timestamp": time_s, **wandb_values(record)})
        values = {"_timestamp": time_s, ELAPSED: time_s - self._began_s}
        if record["kind"] == "sample":
            position = f"{POSITION}/worker/{record['worker']}"
            return Row(position, {**values, position: time_s, **_sample_values(record, self._name_nodes)})
        position, name = f"{POSITION}/alert", record["name"]
        raised = record["state"] == "raised"
        alert = {"title": name.replace("_", " "), "text": record["message"], "level": "WARN"}
        sent = alert if raised and time_s >= self._alerts_from_s else None
        return Row(position, {**values, position: time_s, f"alert/{name}": int(raised)}, sent)


def wandb_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return W&B's values of a record of the loop: ``step``, and ``kind/name`` for each number (``event/name`` = 1)."""
    step, kind = int(record["step"]), record["kind"]
    if kind == "event":
        return {"step": step, f"event/{record['event']}": 1}
    numbers = {
        f"{kind}/{name}": value
        for name, value in record.items()
        if name not in ("step", "time", "kind") and isinstance(value, int | float)
    }
    return {"step": step, **numbers}


def _sample_values(record: Mapping[str, Any], name_nodes: bool) -> dict[str, float]:
    """A sample's values under W&B's names, without what records of the loop have anyway (``train/loss``).

    The machine of worker 0 is plain ``gpu/0/util``, that of another worker ``node/<host>/gpu/0/util``.
    """
    node = f"node/{record['host']}/" if name_nodes and record["worker"] != 0 else ""
    return {
        (node + name if name.startswith(NODE_NAMESPACES) else name): value
        for name, value in record["figures"].items()
        if value is not None and not name.startswith("train/")
    }
