"""Generate Grafana's training dashboard from the panels of :mod:`esmeray.monitoring.sampling.metric_names`.

The dashboard is not checked in. This module needs the standard library only, so any Python on the host can run it:

    python -m esmeray.monitoring.sampling.grafana > docker/grafana/esmeray.json
"""

import json
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from esmeray.monitoring.sampling.metric_names import PANELS, Metric

COLUMNS, PANEL_COLUMNS, PANEL_ROWS = 24, 8, 8
"""Sizes in Grafana's grid: its width, and width and height of a panel."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""Data source as a variable, since each Grafana has its own id for Prometheus: the file can be imported anywhere."""
UNITS = {
    "bytes/s": "Bps",
    "seconds": "s",
    "tokens/s": "suffix: tokens/s",
    "watts": "watt",
    "MHz": "suffix: MHz",
    "share": "percentunit",
    "count": "short",
    "bits": "short",
    "number": "short",
}
"""Grafana's names of units that differ from the metrics' names."""
LEGENDS = {"{gpu}": "{{host}} GPU {{gpu}}", "{worker}": "worker {{worker}}", "host/": "{{host}}"}
"""Legends of metrics with several lines, by a part of the metric's name; other metrics have one line per run."""


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for section, graphs in PANELS.items():
        grid = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": section, "collapsed": False, "gridPos": grid, "panels": []})
        y += 1
        for index, (title, metrics) in enumerate(graphs.items()):
            line, column = divmod(index, COLUMNS // PANEL_COLUMNS)
            grid = {"x": column * PANEL_COLUMNS, "y": y + line * PANEL_ROWS, "w": PANEL_COLUMNS, "h": PANEL_ROWS}
            panels.append({**_graph(title, metrics), "gridPos": grid})
        y += (line + 1) * PANEL_ROWS
    return {
        "title": "Esmeray",
        "uid": "esmeray",  # fixed: a new import replaces the dashboard, and links to it stay valid
        "description": "Training runs on this Ray cluster.",
        "tags": ["ray", "esmeray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # shared cursor in all panels
        "refresh": "10s",  # Ray's export interval
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _graph(title: str, metrics: Sequence[Metric]) -> dict[str, Any]:
    (unit,) = {metric.unit for metric in metrics}  # a panel has one axis
    stacked = title == "Phases of a step"  # its metrics add up to a step
    drawn = {
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 0,
        "showPoints": "auto",
        "spanNulls": 60_000,  # ms: PCIe traffic of each of eight GPUs comes every 40 s
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    # A loss may be negative; all other axes start at zero.
    defaults = {"unit": UNITS.get(unit, unit), "min": None if unit == "number" else 0, "custom": drawn}
    targets = []
    for letter, metric in zip(ascii_uppercase, metrics, strict=False):
        legend = next((label for part, label in LEGENDS.items() if part in metric.name), "run")
        if len(metrics) > 1:
            legend = f"{metric.last_part}, {legend}"
        query = f'ray_{metric.prometheus_name}{{SessionName=~"$SessionName",host=~"$host"}}'
        targets.append({"refId": letter, "datasource": SOURCE, "expr": query, "legendFormat": legend})
    return {
        "type": "timeseries",
        "title": title,
        "description": "\n".join(f"{metric.last_part}: {metric.description}." for metric in metrics),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    """Return the variables at the top: Prometheus data source, Ray sessions, and their machines."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    # Every worker exports this metric, also without a GPU, so it has all label values.
    series = "ray_esmeray_host_worker_rss_bytes"
    return [source, _variable("SessionName", series), _variable("host", f'{series}{{SessionName=~"$SessionName"}}')]


def _variable(label: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{label}-variable"},
        "refresh": 2,  # with each change of the time range: sessions come and go
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
