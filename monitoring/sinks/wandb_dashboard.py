"""A W&B workspace that shows every figure of a run where a reader looks for it.

In: a project. Out: a workspace of wandb-workspaces, built offline, and its specification as JSON. One panel shows one
figure of all GPUs, nodes or workers: it finds them by a pattern, so that the same workspace serves a run of one GPU and
of many. What the figures are comes from :mod:`monitoring.sampling.metric_names`; what they are called in W&B, and their
axes, from :mod:`monitoring.sinks.wandb_names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

from monitoring.sampling.metric_names import METRICS, Metric, last_part
from monitoring.sinks.wandb_names import ELAPSED, NODE_NAMESPACES

NAME = "Esmeray"
"""Of the workspace."""
STEP_PARTS = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "communication_s", "checkpoint_s")
"""What a step's time is split into."""
SECTIONS = ("Throughput", "Loss", "Step split", "GPUs", "Memory", "Host", "Workers", "Alerts")
_OPEN = frozenset({"Throughput", "Loss", "Step split", "GPUs"})
_VALIDATION = "(validation|train)/(?!loss$).+"


def build_dashboard(project: str, entity: str, workers: int = 1) -> ws.Workspace:
    """The workspace; nothing is sent.

    Args:
        project: of W&B.
        entity: user or team.
        workers: whose steps are drawn as stacked parts, one panel each.
    """
    panels: dict[str, list[Any]] = {section: [] for section in SECTIONS}
    for metric in METRICS:
        panels[section_of(metric)].append(_panel(metric))
    panels["Loss"] += [
        wr.LinePlot(title="Validation loss", x="step", y=["validation/loss"]),
        wr.LinePlot(title="Other figures of training and validation", x="step", metric_regex=_VALIDATION),
    ]
    panels["Step split"] = [_split(worker) for worker in range(workers)] + panels["Step split"]
    panels["Alerts"] = [wr.LinePlot(title="Alerts: 1 raised, 0 over", x=ELAPSED, metric_regex="alert/.+")]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=list(_sections(panels)))


def specification(workspace: ws.Workspace) -> dict[str, Any]:
    """What W&B gets of a workspace, as JSON values."""
    view = workspace._to_model()  # the package has no public way to it that asks no server (0.4.13)
    return view.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def section_of(metric: Metric) -> str:
    """Where a figure is shown."""
    part = last_part(metric)
    if metric.group == "train":
        return "Loss"
    if metric.group == "perf":
        return "Throughput"
    if metric.group == "worker" and part in STEP_PARTS:
        return "Step split"
    if part.startswith(("mem_used", "mem_total", "host_", "torch_")) or part == "rss_bytes":
        return "Memory"
    return {"gpu": "GPUs", "worker": "Workers"}.get(metric.group, "Host")


def pattern_of(metric: Metric) -> str:
    """A regular expression of this figure's names in W&B: of every GPU or worker, on every node."""
    plain = re.sub(r"\\?\{\w+\\?\}", "[0-9]+", re.escape(metric.name))
    return f"(node/[^/]+/)?{plain}" if metric.name.startswith(NODE_NAMESPACES) else plain


def _panel(metric: Metric) -> wr.LinePlot:
    axis = "step" if metric.group == "train" else ELAPSED
    title = f"{metric.description} ({last_part(metric)})"
    return wr.LinePlot(title=title, title_y=metric.unit, x=axis, metric_regex=f"^{pattern_of(metric)}$")


def _split(worker: int) -> wr.LinePlot:
    names: list[Any] = [f"worker/{worker}/{part}" for part in STEP_PARTS]
    return wr.LinePlot(
        title=f"Where a step's time goes, worker {worker}",
        title_y="seconds",
        x=ELAPSED,
        y=names,
        plot_type="stacked-area",
    )


def _sections(panels: dict[str, list[Any]]) -> Iterable[ws.Section]:
    for name, members in panels.items():
        yield ws.Section(name=name, panels=members, is_open=name in _OPEN)
