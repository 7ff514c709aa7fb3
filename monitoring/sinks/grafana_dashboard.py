"""Grafana's dashboard of a run, made from the list of metrics.

In: :mod:`monitoring.sampling.metric_names`. Out: the JSON that Grafana imports, checked in as
``docker/grafana/esmeray.json``. ``python -m monitoring.sinks.grafana_dashboard`` writes that file anew; a test says
when it is due.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitoring.sampling.metric_names import METRICS, Metric, Unit, last_part

FILE = Path(__file__).resolve().parents[2] / "docker" / "grafana" / "esmeray.json"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS: dict[Unit, str] = {
    "percent": "percent",
    "bytes": "bytes",
    "bytes/s": "Bps",
    "seconds": "s",
    "tokens/s": "suffix: tokens/s",
    "celsius": "celsius",
    "watts": "watt",
    "MHz": "suffix: MHz",
    "share": "percentunit",
    "count": "short",
    "bits": "short",
    "number": "short",
}
_BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        title: above it.
        names: of its metrics, all of one unit.
        stacked: whether the metrics are parts of a whole.
    """

    title: str
    names: tuple[str, ...]
    stacked: bool = False

    @property
    def metrics(self) -> list[Metric]:
        """In the order of their lines."""
        return [_BY_NAME[name] for name in self.names]


def _gpu(*names: str) -> tuple[str, ...]:
    return tuple(f"gpu/{{gpu}}/{name}" for name in names)


def _worker(*names: str) -> tuple[str, ...]:
    return tuple(f"worker/{{worker}}/{name}" for name in names)


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Training": (
        Panel("Real tokens per second", ("perf/tokens_per_s",)),
        Panel("Loss", ("train/loss",)),
        Panel("Model FLOPs utilisation", ("perf/mfu",)),
        Panel("Step", ("perf/step_s",)),
        Panel("Token budget left empty", ("perf/padding_share", *_worker("padding_share"))),
    ),
    "Where a worker's step goes": (
        Panel(
            "Phases of a step",
            _worker("data_wait_s", "forward_s", "backward_s", "optimizer_s", "communication_s", "checkpoint_s"),
            stacked=True,
        ),
        Panel("Step of each worker", _worker("step_s")),
        Panel("Batches that are ready", _worker("loader_queue_depth")),
        Panel("Features that were kept", _worker("feature_cache_hit_rate")),
    ),
    "GPUs": (
        Panel("GPU utilisation", _gpu("util")),
        Panel("GPU memory in use", _gpu("mem_used_bytes", "mem_total_bytes")),
        Panel("GPU memory read or written", _gpu("mem_util")),
        Panel("Temperature", _gpu("temperature_c")),
        Panel("Power", _gpu("power_w", "power_limit_w")),
        Panel("Clocks", _gpu("sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz")),
        Panel("Throttle reasons (NVML's bits)", _gpu("throttle_reasons")),
        Panel("PCIe", _gpu("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")),
        Panel("NVLink", _gpu("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")),
        Panel("Memory errors", _gpu("ecc_corrected", "ecc_uncorrected")),
        Panel("Processes", _gpu("processes")),
    ),
    "Memory of the workers": (
        Panel(
            "In tensors, reserved, peak", _worker("torch_allocated_bytes", "torch_reserved_bytes", "torch_peak_bytes")
        ),
        Panel("Reserved without a tensor", _worker("torch_fragmentation")),
        Panel("Allocations tried again", _worker("torch_alloc_retries")),
        Panel("Resident memory with loaders", (*_worker("rss_bytes"), "mem/host_rss_bytes")),
    ),
    "Machines": (
        Panel("Memory", ("mem/host_used_bytes", "mem/host_available_bytes", "mem/host_total_bytes")),
        Panel("Cores", ("cpu/percent",)),
        Panel("CPU of the workers (100 is a core)", _worker("cpu_percent")),
        Panel("Disks", ("disk/read_bytes_per_s", "disk/write_bytes_per_s")),
        Panel("Network", ("net/sent_bytes_per_s", "net/received_bytes_per_s")),
    ),
}
"""The graphs by section. Every metric is in one of them."""


def dashboard() -> dict[str, Any]:
    """The dashboard, as JSON values."""
    return {
        "title": "Esmeray",
        "uid": "esmeray",
        "description": "Runs that train_ray.py has on this Ray cluster. Made by monitoring/sinks/grafana_dashboard.py.",
        "tags": ["ray", "esmeray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def query(metric: Metric) -> str:
    """What Prometheus is asked for."""
    return f'ray_{metric.prometheus_name}{{SessionName=~"$SessionName",host=~"$host"}}'


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    row = 0
    for title, section in SECTIONS.items():
        place = {"x": 0, "y": row, "w": _COLUMNS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        row += 1
        across = _COLUMNS // _WIDTH
        for number, panel in enumerate(section):
            x, y = number % across * _WIDTH, row + number // across * _HEIGHT
            panels.append(_graph(panel, len(panels) + 1, {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT}))
        row += -(-len(section) // across) * _HEIGHT
    return panels


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    (unit,) = {metric.unit for metric in panel.metrics}
    drawn = {
        "lineWidth": 1,
        "fillOpacity": 60 if panel.stacked else 0,
        "showPoints": "auto",
        "spanNulls": 60_000,  # PCIe traffic of each of eight GPUs comes every 40 s
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n".join(f"{last_part(metric)}: {metric.description}." for metric in panel.metrics),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": _UNITS[unit], "min": None if unit == "number" else 0, "custom": drawn},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query(metric),
                "legendFormat": _legend(metric, named=len(panel.metrics) > 1),
            }
            for index, metric in enumerate(panel.metrics)
        ],
    }


def _legend(metric: Metric, named: bool) -> str:
    of = {"gpu": "{{host}} GPU {{gpu}}", "worker": "worker {{worker}}", "host": "{{host}}", "run": "run"}[metric.per]
    return f"{last_part(metric)}, {of}" if named else of


def _variables() -> list[dict[str, Any]]:
    anywhere = f"ray_{_BY_NAME['worker/{worker}/rss_bytes'].prometheus_name}"
    labels = {"SessionName": anywhere, "host": f'{anywhere}{{SessionName=~"$SessionName"}}'}
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return [source, *(_label_variable(label, of) for label, of in labels.items())]


def _label_variable(label: str, of: str) -> dict[str, Any]:
    asked = f"label_values({of}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": asked,
        "query": {"query": asked, "refId": f"{label}-variable"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
