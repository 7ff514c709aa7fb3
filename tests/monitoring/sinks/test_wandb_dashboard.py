"""The workspace shows every figure of the catalogue, whatever GPU, node or worker it is of."""

from __future__ import annotations

import re
from typing import Any

import pytest

from monitoring.sampling.metric_names import METRICS, Metric
from monitoring.sinks.wandb_dashboard import SECTIONS, STEP_PARTS, build_dashboard, section_of, specification
from monitoring.sinks.wandb_names import WandbRows
from tests.monitoring.samples import sample, train


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return specification(build_dashboard("esmeray", "team", workers=2))


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [panel["config"] | {"section": section["name"]} for section in sections for panel in section["panels"]]


def panels_of(spec: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Those that show this figure."""
    return [
        panel
        for panel in panels(spec)
        if name in panel["metrics"] or (panel.get("useMetricRegex") and re.search(panel["metricRegex"], name))
    ]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_a_panel_in_its_section(metric: Metric, spec: dict[str, Any]) -> None:
    for index in (0, 12):
        shown = panels_of(spec, metric.of(index))
        assert shown and {panel["section"] for panel in shown} == {section_of(metric)}


def test_every_value_that_is_logged_is_shown_against_its_axis(spec: dict[str, Any]) -> None:
    rows = WandbRows(alerts_from_s=0.0, name_nodes=True)
    records = [
        train(1, 0, learning_rate=1.0, gradient_norm=1.0),
        {"kind": "validation", "step": 1, "time": 1.7e9, "loss": 1.0, "residue_recovery": 0.5},
        *(sample(worker, 0) | {"figures": {m.of(worker): 1.0 for m in METRICS}} for worker in (0, 1)),
        {"kind": "alert", "step": 1, "time": 1.7e9, "name": "memory", "state": "raised", "message": ""},
    ]
    for record in records:
        values = rows.row(record).values
        for name in values:
            if "/" not in name or name.startswith("position/"):
                continue
            shown = panels_of(spec, name)
            assert shown, name
            assert all(panel["xAxis"] in values for panel in shown), name


def test_sections_come_in_order_and_none_is_empty(spec: dict[str, Any]) -> None:
    assert list(dict.fromkeys(panel["section"] for panel in panels(spec))) == list(SECTIONS)


def test_a_steps_parts_are_stacked_for_each_worker(spec: dict[str, Any]) -> None:
    stacked = [panel["metrics"] for panel in panels(spec) if panel.get("plotType") == "stacked-area"]
    assert stacked == [[f"worker/{worker}/{part}" for part in STEP_PARTS] for worker in (0, 1)]
    known = {metric.name for metric in METRICS}
    assert {f"worker/{{worker}}/{part}" for part in STEP_PARTS} <= known
