import io

import pytest

from esmeray.monitoring.watch.progress import ProgressSink, describe_event
from esmeray.tasks.registry import metric_labels


def train(step: int, **values) -> dict:
    defaults = {"loss": 2.5, "tokens_per_s": 12_345.0, "learning_rate": 1e-3, "time": 100.0 + step}
    return {"kind": "train", "step": step, **defaults, **values}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_lines_come_now_and_then():
    stream, now_s = io.StringIO(), 0
    sink = ProgressSink(1000, metric_labels(), stream=stream, plain_every_s=10, clock=lambda: now_s)
    for now_s in range(1, 101):
        sink.write(train(now_s))
    sink.write({"kind": "validation", "step": 100, "loss": 1.0, "residue_recovery": 0.5})
    sink.write(train(101))
    sink.write({"kind": "sample", "step": 101, "time": 201.0, "host.cpu": 0.5})
    sink.close()
    lines = stream.getvalue().splitlines()
    assert 11 <= len(lines) <= 14  # one line explains the metric `recovery`
    assert [line for line in lines if "validation" in line] == ["step 100: validation loss 1.0000, recovery 0.500"]


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
@pytest.mark.parametrize("columns", ["50", "100"])
def test_metrics_and_alerts_are_shown_once_above_the_line(make, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    stream = make()
    sink = ProgressSink(120, metric_labels(), stream=stream)
    for step in (85, 86):
        sink.write(train(step))
        sink.write({"kind": "validation", "step": step, "loss": 1.0, "residue_recovery": 0.5, "feature_r2": step / 100})
    alert = {"kind": "alert", "step": 1, "time": 0.0, "name": "memory", "subject": "GPU 0"}
    sink.write({**alert, "state": "raised", "message": "it is full"})
    sink.write({**alert, "state": "cleared", "message": "there is room"})
    sink.close()
    shown = stream.getvalue()
    once = ("recovery: share of the residues", "R²: share of the features' variance", "R² 0.850", "warning: it is full")
    assert [shown.count(text) for text in once] == [1] * len(once) and "over: there is room" in shown
    line = next(line for line in reversed(shown.splitlines()) if "step 86/120 ·" in line)
    assert "loss 2.5000 · 34 s left" in line
    assert ("12.3k tokens/s · lr 1.00e-03" in line) == (columns == "100" or make is io.StringIO)


def test_a_line_has_step_loss_speed_rate_and_time_left():
    stream = io.StringIO()
    sink = ProgressSink(10, metric_labels(), stream=stream, clock=lambda: 0.0)
    sink.write({"kind": "event", "step": 0, "event": "started", "total_steps": 100})
    sink.write(train(1, loss=None, nonfinite=True, skipped_steps=1))
    sink.write(train(2, tokens_seen=3_210_000))
    sink.close()
    first, last = stream.getvalue().splitlines()
    assert "loss NaN" in first and "1 skipped" in first
    assert last == "step 2/100 · loss 2.5000 · 1:38 left · 12.3k tokens/s · after 3.21M tokens, 1 s · lr 1.00e-03"


def test_events_are_said_in_words():
    for event, line in [
        ({"event": "checkpoint", "checkpoint": "x"}, "step 3: checkpoint saved"),
        ({"event": "warning", "message": "look here"}, "warning: look here"),
        ({"event": "nonfinite"}, "step 3: loss or gradient not finite, update skipped"),
        ({"event": "loss_scale_lowered"}, "step 3: loss scale lowered"),
        ({"event": "resized", "from": 2, "to": 1, "why": "failures"}, "step 3: from 2 to 1 workers (failures)"),
        ({"event": "diverged", "message": "not finite"}, None),
        ({"event": "finished", "message": "x"}, None),
    ]:
        assert describe_event({"kind": "event", "step": 3, "time": 0.0, **event}) == line
