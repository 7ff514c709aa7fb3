"""A run as a picture for the terminal, by rich, at any width from 60 columns on.

Panels for which the run has nothing are left out, or say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.text import amount, duration
from monitoring.sampling.nvml import describe_throttling
from monitoring.watch.progress import describe_event, describe_validation
from monitoring.watch.run_state import RunState, Worker
from monitoring.watch.text_charts import bar, chart, stacked_bar
from run_folder.metrics_log import Record

_STATUS_COLOURS = {
    "running": "green",
    "finished": "bright_blue",
    "starting": "cyan",
    "not begun": "cyan",
    "quiet": "yellow",
    "stopped": "yellow",
}
_PART_COLOURS = {
    "data_wait": "red",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "green",
    "communication": "magenta",
    "checkpoint": "yellow",
    "other": "grey50",
}
_GIB = 2.0**30
_TWO_COLUMNS = 96
"""From this width on, panels stand side by side."""
_CHART_LINES = 4
_DEVICE_INDENT = " " * 7
"""Under the bars of a device."""
_DISK = ("disk/read_bytes_per_s", "disk/write_bytes_per_s")
_MOST_WORKERS, _MOST_ALERTS = 12, 6
_SILENT_S = 120.0
"""Without a sample for this long a worker of a running run is marked."""


def draw_run(state: RunState, now: float, width: int) -> RenderableType:
    """Draw the run as last read, at ``now`` (Unix seconds), in so many columns."""
    moment = state.moment(now)
    half = width // 2 if width >= _TWO_COLUMNS else width
    curves = [panel for panel in (_throughput(state, half), _loss(state, half)) if panel is not None]
    beside = half if state.hosts else width
    below = [panel for panel in (_devices(state, half), _split(state, beside)) if panel is not None]
    parts: list[RenderableType] = [_header(state, now)]
    parts += _beside(curves, width)
    parts += _beside(below, width)
    if state.workers:
        parts.append(_workers(state, moment))
    parts.append(_alerts(state, moment))
    return Group(*parts)


def _beside(panels: Sequence[RenderableType], width: int) -> list[RenderableType]:
    """Two panels side by side where there is room."""
    if len(panels) < 2 or width < _TWO_COLUMNS:
        return list(panels)
    table = Table.grid(expand=True, padding=(0, 0))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(*panels)
    return [table]


def _header(state: RunState, now: float) -> Panel:
    status = state.status(now)
    colour = _STATUS_COLOURS.get(status.word, "red")
    first = Text.assemble((status.word, f"bold {colour}"), (f"  {status.note}" if status.note else "", "dim"))
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    table.add_row(first, Text(_model(state), style="dim"))
    if state.steps or state.total_steps:
        table.add_row(_progress(state), Text(" · ".join(_times(state, now))))
    if (news := _news(state)) is not None:
        table.add_row(Text(news, style="dim", overflow="ellipsis", no_wrap=True), "")
    for problem in state.problems:
        table.add_row(Text(problem, style="yellow"), "")
    return _panel(table, state.name, colour)


def _progress(state: RunState) -> Text:
    share = state.step / state.total_steps if state.total_steps else None
    text = bar(share, 24, "green")
    total = f"/{state.total_steps:,}" if state.total_steps else ""
    text.append(f"  step {state.step:,}{total}", "bold")
    if share is not None:
        text.append(f"  {share:.0%}")
    if state.steps and "epoch" in state.steps[-1]:
        text.append(f"  epoch {state.steps[-1]['epoch']}", "dim")
    return text


def _times(state: RunState, now: float) -> list[str]:
    parts = []
    if (elapsed := state.elapsed_s(now)) is not None:
        parts.append(f"{duration(elapsed)} so far" if not state.has_ended else f"took {duration(elapsed)}")
    if (left := state.left_s()) is not None:
        parts.append(f"{duration(left)} left")
    return parts


def _news(state: RunState) -> str | None:
    """The last validation, or else the last event that is worth a line."""
    if state.validation is not None:
        return f"step {state.validation['step']:,}: {describe_validation(state.validation)}"
    return describe_event(state.event) if state.event is not None and "event" in state.event else None


def _model(state: RunState) -> str:
    model = state.config.get("model")
    if not isinstance(model, Mapping):
        return ""
    backbone = model.get("backbone")
    source = backbone.get("source") if isinstance(backbone, Mapping) else None
    return " · ".join(str(part) for part in (model.get("task"), source) if part)


def _throughput(state: RunState, width: int) -> Panel | None:
    speed = state.pace.tokens_per_s()
    if speed is None:
        return None
    rates = [record.get("tokens_per_s") for record in state.steps]
    highest = max((rate for rate in rates if rate), default=0.0)
    text = Text.assemble((f"{amount(speed)} tokens/s", "bold"), f"  highest {amount(highest)}")
    if 0 in state.workers and (mfu := state.workers[0].metrics.get("perf/mfu")) is not None:
        text.append(f"  {mfu:.1%} MFU")
    if step_s := state.pace.seconds_per_step():
        text.append(f"  {step_s:.3g} s/step", "dim")
    return _panel(Group(text, chart(rates, width - 4, _CHART_LINES, "green", low=0.0)), "throughput")


def _loss(state: RunState, width: int) -> Panel | None:
    losses = [record.get("loss") for record in state.steps]
    if not losses:
        return None
    last = state.steps[-1]
    text = Text.assemble(("NaN", "bold red") if losses[-1] is None else (f"{losses[-1]:.4f}", "bold"))
    if known := [loss for loss in losses if loss is not None]:
        text.append(f"  lowest {min(known):.4f}")
    if (rate := last.get("learning_rate")) is not None:
        text.append(f"  lr {rate:.2e}", "dim")
    if skipped := last.get("skipped_steps"):
        text.append(f"  {skipped} skipped", "yellow")
    return _panel(Group(text, chart(losses, width - 4, _CHART_LINES, "bright_blue")), "loss")


def _devices(state: RunState, width: int) -> Panel | None:
    if not state.hosts:
        return None
    length = max(6, min(16, (width - 44) // 2))
    lines: list[Text] = []
    for host, metrics in sorted(state.hosts.items()):
        if len(state.hosts) > 1:
            lines.append(Text(host, style="bold"))
        for gpu in sorted({int(name.split("/")[1]) for name in metrics if name.startswith("gpu/")}):
            own = {name.split("/")[2]: value for name, value in metrics.items() if name.startswith(f"gpu/{gpu}/")}
            lines += _gpu(gpu, own, length, width - 4)
        lines += _host(metrics, length, width - 4)
    return _panel(Group(*lines), "devices")


def _gpu(gpu: int, metrics: Mapping[str, float], length: int, room: int) -> list[Text]:
    """Load, memory and the rest, which goes below where it has no room; a further line where something slows it."""
    forms = (("temperature_c", "{:.0f}°C"), ("power_w", "{:.0f}W"), ("sm_clock_mhz", "{:.0f}MHz"))
    details = " ".join(form.format(metrics[name]) for name, form in forms if name in metrics)
    used, total = metrics.get("mem_used_bytes"), metrics.get("mem_total_bytes")
    lines = _with_details(_device(f"GPU {gpu}", metrics.get("util"), used, total, length), details, room)
    if throttled := describe_throttling(int(metrics.get("throttle_reasons", 0))):
        lines.append(Text(f"{_DEVICE_INDENT}slowed: {', '.join(throttled)}", style="bold red"))
    return lines


def _host(metrics: Mapping[str, float], length: int, room: int) -> list[Text]:
    """The machine, which is all that there is to see without a GPU; a second line where its disk has no room."""
    used, total = metrics.get("mem/host_used_bytes"), metrics.get("mem/host_total_bytes")
    line = _device("CPU", metrics.get("cpu/percent"), used, total, length)
    disk = [f"{metrics[name] / 1e6:.0f}" for name in _DISK if name in metrics]
    return _with_details(line, f"disk {'/'.join(disk)} MB/s" if disk else "", room)


def _with_details(line: Text, details: str, room: int) -> list[Text]:
    """A device's line with what else is known of it behind, or below where that has no room."""
    if not details:
        return [line]
    if len(line) + 2 + len(details) > room:
        return [line, Text(f"{_DEVICE_INDENT}{details}", style="dim")]
    line.append(f"  {details}", "dim")
    return [line]


def _device(name: str, load: float | None, used: float | None, total: float | None, length: int) -> Text:
    """One line: what works, how much, and its memory."""
    share = used / total if used is not None and total else None
    return Text.assemble(
        f"{name:<6} ",
        _labelled(load, None if load is None else load / 100, "{:.0f}%", length, "blue"),
        "  ",
        _labelled(None if used is None else used / _GIB, share, "{:.1f}G", length, _memory_colour(share)),
        no_wrap=True,
        overflow="ellipsis",
    )


def _labelled(value: float | None, share: float | None, form: str, length: int, colour: str) -> Text:
    text = bar(share, length, colour)
    text.append(f" {'?' if value is None else form.format(value):>6}")
    return text


def _memory_colour(share: float | None) -> str:
    if share is None or share < 0.85:
        return "green"
    return "yellow" if share < 0.95 else "red"


def _split(state: RunState, width: int) -> Panel | None:
    split = state.step_split()
    parts = [(name, value) for name, value in split.items() if value > 0 and name != "checkpoint"]
    whole = sum(value for _, value in parts)
    if not whole:
        return None
    line = stacked_bar([(value, _PART_COLOURS[name]) for name, value in parts], width - 4)
    table = Table.grid(padding=(0, 2))
    words = [
        Text.assemble(("■ ", _PART_COLOURS[name]), f"{name.replace('_', ' ')} {value / whole:.1%}")
        for name, value in parts
    ]
    columns = max(1, (width - 4) // 22)
    for first in range(0, len(words), columns):
        table.add_row(*words[first : first + columns])
    checkpoint = split.get("checkpoint", 0.0)
    between = f", and {checkpoint * 1e3:.1f} ms for checkpoints" if checkpoint > 0 else ""
    return _panel(Group(line, table), f"a step: {whole * 1e3:.0f} ms{between}")


def _workers(state: RunState, moment: float) -> Panel:
    table = Table(expand=True, box=None, padding=(0, 1), header_style="dim", show_edge=False)
    columns: Sequence[tuple[str, Callable[[Worker], Text | str]]] = (
        ("worker", lambda worker: f"{worker.rank}"),
        ("on", lambda worker: worker.host),
        ("step", lambda worker: f"{worker.step:,}"),
        ("seen", lambda worker: _seen(worker, moment, ended=state.has_ended)),
        ("memory", lambda worker: _gib(worker, "rss_bytes")),
        ("CPU", lambda worker: _said(worker, "cpu_percent", "{:.0f}%")),
        ("GPU memory", lambda worker: _gib(worker, "torch_reserved_bytes")),
        ("data wait", lambda worker: _said(worker, "data_wait_s", "{:.1f} ms", 1e3)),
        ("queue", lambda worker: _said(worker, "loader_queue_depth", "{:.0f}")),
    )
    shown = sorted(state.workers.values(), key=lambda worker: worker.rank)
    late = sorted(shown, key=lambda worker: worker.time)[:2] if len(shown) > _MOST_WORKERS else []
    chosen = [*shown[: _MOST_WORKERS - len(late)], *late] if late else shown
    every = [(title, [cell(worker) for worker in chosen]) for title, cell in columns]
    filled = [(title, cells) for title, cells in every if any(str(text) for text in cells)]
    for title, _ in filled:
        table.add_column(title, justify="left" if title in ("worker", "on") else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in filled), strict=True):
        table.add_row(*row)
    more = f" ({len(chosen)} of {len(shown)})" if len(chosen) < len(shown) else ""
    return _panel(table, f"workers{more}")


def _seen(worker: Worker, moment: float, ended: bool) -> Text:
    age = max(0.0, moment - worker.time)
    if ended:
        return Text("ended", style="dim")
    return Text(f"{duration(age)} ago", style="bold red" if age > _SILENT_S else "")


def _said(worker: Worker, name: str, form: str, factor: float = 1.0) -> str:
    value = worker.metrics.get(f"worker/{worker.rank}/{name}")
    return "" if value is None else form.format(value * factor)


def _gib(worker: Worker, name: str) -> str:
    return _said(worker, name, "{:.2f}G", 1 / _GIB)


def _alerts(state: RunState, moment: float) -> Panel:
    alerts = state.alerts
    if not alerts:
        return _panel(Text("none", style="dim"), "alerts")
    until = "before the end" if state.has_ended else "ago"
    lines = [_alert(alert, moment, until) for alert in alerts[:_MOST_ALERTS]]
    more = [Text(f"and {len(alerts) - _MOST_ALERTS} more", style="dim")] if len(alerts) > _MOST_ALERTS else []
    holds = any(alert.get("state") != "cleared" for alert in alerts)
    return _panel(Group(*lines, *more), "alerts", "red" if holds else "grey50")


def _alert(alert: Record, moment: float, until: str) -> Text:
    age = duration(max(0.0, moment - float(alert.get("time") or moment)))
    over = alert.get("state") == "cleared"
    name = str(alert.get("name", "")).replace("_", " ")
    return Text.assemble(
        ("✓ " if over else "! ", "green" if over else "bold red"),
        (name, "dim" if over else "bold"),
        (f"  {alert.get('message', '')}", "dim" if over else ""),
        (f"  {age} {until}", "dim"),
        overflow="ellipsis",
    )


def _panel(content: RenderableType, title: str, colour: str = "grey50") -> Panel:
    return Panel(content, title=Text(title, style="bold"), title_align="left", border_style=colour, padding=(0, 1))
