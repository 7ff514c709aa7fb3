"""Grafana's dashboard of training, made from the panels of :mod:`esmeray.monitoring.sampling.metric_names`.

It is not checked in. This writes it, by the standard library alone, so that any Python of the host can:

    python -m esmeray.monitoring.sampling.grafana > docker/grafana/esmeray.json
"""

import json
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from esmeray.monitoring.sampling.metric_names import PANELS, Metric

COLUMNS, PANEL_COLUMNS, PANEL_ROWS = 24, 8, 8
"""Of Grafana's grid: its width, and width and height of a panel."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""A variable, since each Grafana has an id of its own for its Prometheus: one file can be imported anywhere."""
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
"""Grafana's names of the units that it calls otherwise than the metrics do."""
LEGENDS = {"{gpu}": "{{host}} GPU {{gpu}}", "{worker}": "worker {{worker}}", "host/": "{{host}}"}
"""Labels that distinguish the lines of a metric, by a part of its name; other metrics are of the whole run."""


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
        "uid": "esmeray",  # fixed: an import replaces the dashboard of before, and links to it hold
        "description": "Runs that train_ray.py has on this Ray cluster.",
        "tags": ["ray", "esmeray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cursor in all panels: what happened at once is seen at once
        "refresh": "10s",  # Ray exports no more often
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _graph(title: str, metrics: Sequence[Metric]) -> dict[str, Any]:
    (unit,) = {metric.unit for metric in metrics}  # a panel has one axis
    stacked = title == "Phases of a step"  # its metrics are parts of a whole
    drawn = {
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 0,
        "showPoints": "auto",
        "spanNulls": 60_000,  # ms: PCIe traffic of each of eight GPUs comes every 40 s
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    # A loss may be negative; everything else is read best from zero on.
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
    """The choices at the top: which Prometheus, then sessions of Ray, and machines of these."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    # Every worker has this metric, on a machine without a GPU, too: its labels are all that there are.
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
