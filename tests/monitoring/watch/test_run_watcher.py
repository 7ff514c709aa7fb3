import pytest

from esmeray.monitoring.watch import run_watcher
from esmeray.monitoring.watch.run_watcher import CurvesSink, RunWatcher
from esmeray.run_folder.metrics_log import MetricsLog
from esmeray.run_folder.paths import RunFolder, sample_file
from tests.monitoring.samples import append, sample, wait_until


class Recorder:
    """A sink that records its input."""

    def __init__(self, fails_at: int | None = None):
        self.steps: list[int] = []
        self.closed = 0
        self._fails_at = fails_at

    def write(self, record):
        if record["step"] == self._fails_at:
            raise ValueError("broken sink")
        self.steps.append(record["step"])

    def close(self):
        self.closed += 1


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path.parent, tmp_path.name)


def test_sinks_get_every_new_record_and_are_closed_once(run):
    append(run.metrics, {"kind": "train", "step": 1})
    sink = Recorder()
    watcher = RunWatcher(run, [sink], print, poll_s=0.01)
    with MetricsLog(run.metrics) as log:
        log.append({"kind": "train", "step": 2})
        assert wait_until(lambda: sink.steps == [2], 10.0)
        log.append({"kind": "train", "step": 3})
        append(sample_file(run.monitoring, 1), sample(1, 1, step=4))
        watcher.close()
    assert sorted(sink.steps) == [2, 3, 4]
    assert sink.closed == 1


def test_a_broken_sink_is_reported_once(run):
    broken, honest, warnings = Recorder(fails_at=2), Recorder(), []

    class Alarm(Recorder):
        def write(self, record):
            if record["kind"] == "train":
                append(run.alerts, {"kind": "alert", "step": record["step"] + 100})

    watcher = RunWatcher(run, [Alarm(), broken, honest], warnings.append, poll_s=60.0)
    append(run.metrics, *({"kind": "train", "step": step} for step in (1, 2, 3)))
    watcher.close()
    assert honest.steps == [1, 2, 3, 101, 102, 103]
    assert broken.steps == [1]
    assert len(warnings) == 1 and "broken sink" in warnings[0]


def test_curves_are_drawn_after_a_validation(run, monkeypatch):
    sink = CurvesSink(run, {})
    validation = {"kind": "validation", "step": 1, "loss": 1.0}
    append(run.metrics, validation)
    sink.write(validation)
    assert not run.curves.exists(), "not in the first five minutes"
    monkeypatch.setattr(run_watcher, "CURVES_EVERY_S", 0.0)
    sink.write(validation)
    assert run.curves.read_bytes().startswith(b"\x89PNG")
