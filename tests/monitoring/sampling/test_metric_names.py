"""Every metric has one name, unit and meaning, valid in all sinks."""

import json
import re

from esmeray.monitoring.sampling.metric_names import METRICS, find
from esmeray.monitoring.sampling.peaks import known_gpus, known_peaks, peak_tflops
from tests.conftest import REPOSITORY

SECTIONS = ("train", "throughput", "gpu", "host", "data")


def test_names_are_unique_valid_in_prometheus_and_found_again():
    assert len({metric.prometheus_name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.partition("/")[0] in SECTIONS
        assert re.fullmatch(r"esmeray_[a-z][a-z0-9_]*", metric.prometheus_name)
        assert find(metric.name.format(gpu=12, worker=12)) == (metric, 12 if "{" in metric.name else None)
    for unknown in ("gpu/util", "gpu/x/util", "gpu/0/util/more", "worker/1", "", "perf/tokens_per_s "):
        assert find(unknown) is None


def test_the_page_lists_every_metric_as_the_code_does():
    page = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for section in SECTIONS:
        of_section = [metric for metric in METRICS if metric.name.startswith(f"{section}/")]
        rows = "".join(f"| `{metric.name}` | {metric.unit} | {metric.description} |\n" for metric in of_section)
        assert "| metric | unit | meaning |\n|---|---|---|\n" + rows in page


def test_the_dashboard_shows_every_metric_and_no_other():
    text = (REPOSITORY / "docker" / "grafana" / "esmeray.json").read_text(encoding="utf-8")
    assert set(re.findall(r'"expr": "ray_(\w+)\{', text)) == {metric.prometheus_name for metric in METRICS}
    dashboard = json.loads(text)
    cells = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(cells) == len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?([A-Za-z]\w+)", text)) == variables


BF16 = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "Tesla T4": None,
}


def test_known_gpus_have_their_peak_and_like_names_none():
    assert {name: peak_tflops(name, "bf16") for name in BF16} == BF16
    assert peak_tflops("Tesla V100-SXM2-32GB", "fp16") == 125.0
    assert peak_tflops("Tesla V100-SXM2-32GB", "tf32") == peak_tflops("Tesla V100-SXM2-32GB", "fp32")
    assert {"H100", "A100-40GB", "V100-SXM2-32GB"} < {*known_gpus("fp16")}
    assert not [name for name in known_gpus("bf16") if peak_tflops(name, "bf16") is None]
    assert all(known_peaks(name) for name in known_gpus("fp32"))
