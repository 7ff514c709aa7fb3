"""Every metric has one name, one unit and one meaning, valid wherever it goes."""

import re

from esmeray.monitoring.sampling.metric_names import METRICS, find
from tests.conftest import REPOSITORY

UNITS = {
    "_bytes": "bytes",
    "_bytes_per_s": "bytes/s",
    "_w": "watts",
    "_mhz": "MHz",
    "_c": "celsius",
    "percent": "percent",
    "_share": "share",
}


def test_names_are_unique_valid_in_prometheus_found_again_and_end_in_their_unit():
    assert len({metric.prometheus_name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"esmeray_[a-z][a-z0-9_]*", metric.prometheus_name)
        assert find(metric.name.format(gpu=12, worker=12)) == (metric, 12 if "{" in metric.name else None)
        for ending, unit in UNITS.items():
            assert metric.unit == unit or not metric.name.endswith(ending), metric
        assert metric.unit == "seconds" or not re.search(r"(?<!per)_s$", metric.name), metric
    for unknown in ("gpu/util", "gpu/x/util", "gpu/0/util/more", "worker/1", "", "perf/tokens_per_s "):
        assert find(unknown) is None


def test_the_page_lists_every_metric_as_the_code_does():
    page = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
    rows = "".join(f"| `{metric.name}` | {metric.unit} | {metric.description} |\n" for metric in METRICS)
    assert "| metric | unit | meaning |\n|---|---|---|\n" + rows in page


def test_grafanas_dashboard_shows_every_metric_and_no_other():
    dashboard = (REPOSITORY / "docker" / "grafana" / "esmeray.json").read_text(encoding="utf-8")
    asked = set(re.findall(r'"expr": "ray_(\w+)\{', dashboard))
    assert asked == {metric.prometheus_name for metric in METRICS}
