"""The dashboard that is checked in is the one that the list of metrics makes, and it shows all of them."""

from __future__ import annotations

import json
import re

from monitoring.sampling.metric_names import METRICS, find
from monitoring.sinks.grafana_dashboard import FILE, SECTIONS, dashboard, query, text


def graphs() -> list[dict]:
    return [panel for panel in dashboard()["panels"] if panel["type"] == "timeseries"]


def test_checked_in_file_is_what_the_code_makes():
    assert FILE.read_text(encoding="utf-8") == text(), "python -m monitoring.sinks.grafana_dashboard writes it anew"
    assert json.loads(text()) == dashboard()


def test_every_metric_is_in_one_graph():
    shown = [name for section in SECTIONS.values() for panel in section for name in panel.names]
    assert sorted(shown) == sorted(metric.name for metric in METRICS)


def test_graphs_ask_for_names_that_are_exported():
    asked = {target["expr"] for graph in graphs() for target in graph["targets"]}
    assert asked == {query(metric) for metric in METRICS}
    found = find("gpu/0/util")
    assert found is not None
    assert query(found[0]).startswith("ray_esmeray_gpu_util{")


def test_variables_that_are_used_exist():
    known = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?([A-Za-z]\w+)", text()))
    assert used == known


def test_graphs_do_not_overlap_and_have_numbers_of_their_own():
    taken = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)
