"""Metrics to Prometheus, through the port that Ray opens on each machine for it.

A metric is one gauge, ``ray_esmeray_...`` by the time Prometheus sees it, with the tags ``worker`` and ``host``, and
``gpu`` where there is one for each. Where Ray does not run in this process, there is nothing to export to.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from monitoring.sampling.metric_names import Metric, find

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


def ray_is_running() -> bool:
    """Test whether this process belongs to a Ray cluster. Does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class PrometheusExporter:
    """The gauges of one worker, by its rank, on its machine."""

    def __init__(self, worker: int, host: str) -> None:
        self._tags = {"worker": str(worker), "host": host}
        self._gauges: dict[Metric, Gauge] = {}

    def export(self, values: Mapping[str, float]) -> None:
        """Set the gauges of the values whose names are known; does nothing where Ray does not run."""
        if not ray_is_running():
            return
        for name, value in values.items():
            known = find(name)
            if known is None or not math.isfinite(value):
                continue
            metric, index = known
            tags = self._tags | ({"gpu": str(index)} if metric.per == "gpu" else {})
            self._gauge(metric).set(value, tags)

    def _gauge(self, metric: Metric) -> Gauge:
        if metric not in self._gauges:
            from ray.util.metrics import Gauge

            keys = ("worker", "host", "gpu") if metric.per == "gpu" else ("worker", "host")
            self._gauges[metric] = Gauge(metric.prometheus_name, f"{metric.description} ({metric.unit}).", keys)
        return self._gauges[metric]
