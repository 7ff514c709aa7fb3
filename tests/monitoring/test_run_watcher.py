import time

from monitoring.metrics_log import MetricsLog
from monitoring.run_watcher import RunWatcher


class Recorder:
    """A sink that keeps what it gets."""

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


class LiveRecorder(Recorder):
    live = True


def wait_until(condition, timeout_s=10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_sinks_get_every_record_and_are_closed_once(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = Recorder()
    watcher = RunWatcher(path, [sink], poll_s=0.01).start()
    with MetricsLog(path) as log:
        log.append({"kind": "train", "step": 1})
        wait_until(lambda: sink.steps == [1])
        log.append({"kind": "train", "step": 2})
        watcher.close()
    assert sink.steps == [1, 2]
    assert sink.closed == 1


def test_broken_sink_is_told_once_and_disturbs_no_other(tmp_path):
    path = tmp_path / "m.jsonl"
    broken, honest, warnings = Recorder(fails_at=2), Recorder(), []
    with MetricsLog(path) as log:
        for step in (1, 2, 3):
            log.append({"kind": "train", "step": step})
    RunWatcher(path, [broken, honest], poll_s=0.01, warn=warnings.append).start().close()
    assert honest.steps == [1, 2, 3]
    assert broken.steps == [1]
    assert len(warnings) == 1
    assert "broken sink" in warnings[0]


def test_history_goes_to_those_who_want_the_whole_run_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    whole, live = Recorder(), LiveRecorder()
    with MetricsLog(path) as log:
        log.append({"kind": "train", "step": 1})
        watcher = RunWatcher(path, [whole, live], poll_s=0.01).start()
        log.append({"kind": "train", "step": 2})
        watcher.close()
    assert whole.steps == [1, 2]
    assert live.steps == [2]
