"""Each problem is reported once, in words that say why, again only after it was over, and never for history."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitoring.watch.alert_rules import LEAK_FLOOR_BYTES
from monitoring.watch.alerts import Alert, Alerts, AlertSink
from monitoring.watch.run_watcher import RunWatcher
from run_folder.metrics_log import Record, read_metrics
from run_folder.paths import RunFolder
from run_folder.tail import RecordTail
from tests.monitoring.samples import GIB, append, sample, sample_file, train
from train_config.monitoring_schema import AlertsSection

INTERVAL_S = 5.0
SETTINGS = AlertsSection(
    utilization_percent=50, utilization_window_s=60, memory_percent=90, leak_percent_per_epoch=2, silent_worker_s=120
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def alerts_of(records: list[Record]) -> list[Alert]:
    alerts = Alerts(SETTINGS, INTERVAL_S)
    return [alert for record in records for alert in alerts.take(record)]


def states(alerts: list[Alert]) -> list[tuple[str, str]]:
    return [(alert.name, alert.state) for alert in alerts]


def utilised(*percents: float, from_s: float = 0.0, **figures: float) -> list[Record]:
    return [
        sample(0, from_s + INTERVAL_S * number, gpu__0__util=percent, **figures)
        for number, percent in enumerate(percents)
    ]


STEP = {"worker__0__step_s": 2.0, "worker__0__data_wait_s": 0.1}


def test_low_utilisation_is_reported_after_its_window_with_the_share_of_waiting_for_data():
    records = utilised(90, *[20] * 13, worker__0__step_s=2.0, worker__0__data_wait_s=1.24)
    assert alerts_of(records[:-1]) == []
    (alert,) = alerts_of(records)
    assert (alert.name, alert.state, alert.subject) == ("low_utilization", "raised", "GPU 0 on a")
    assert "20 %" in alert.message and "62% of a step is waiting for batches" in alert.message
    assert "data.num_workers" in alert.message


@pytest.mark.parametrize(
    "figures, words",
    [
        ({**STEP, "worker__0__communication_s": 1.0}, "50% of a step is exchanging gradients"),
        ({**STEP, "worker__0__checkpoint_s": 0.8}, "40% of a step is writing checkpoints"),
        (STEP, "data is not the reason (5% of a step)"),
        ({}, "not known"),
    ],
)
def test_low_utilisation_names_the_likely_reason(figures, words):
    (alert,) = alerts_of(utilised(90, *[20] * 13, **figures))
    assert words in alert.message


def test_utilisation_about_the_threshold_is_reported_once_and_over_when_it_stays_above():
    low, about, high = [30] * 13, [48, 52, 49, 54] * 5, [80] * 7
    assert states(alerts_of(utilised(90, *low, *about, *low))) == [("low_utilization", "raised")]
    cycle = [("low_utilization", "raised"), ("low_utilization", "cleared")]
    assert states(alerts_of(utilised(90, *low, *about, *high, *low, *high))) == cycle * 2


def test_gpu_that_nobody_uses_or_that_has_not_begun_is_not_reported():
    assert alerts_of(utilised(*[0] * 60)) == []
    before_step_1 = [record | {"step": 0} for record in utilised(90, *[1] * 60)]
    assert alerts_of(before_step_1) == []


def test_nobody_knows_what_was_in_a_gap_between_samples():
    assert alerts_of(utilised(90, *[20] * 6) + utilised(*[20] * 6, from_s=1000)) == []


def memory(*shares: float) -> list[Record]:
    names = {"gpu__1__mem_total_bytes": 80.0 * GIB}
    return [sample(0, s, gpu__1__mem_used_bytes=share * 80 * GIB, **names) for s, share in enumerate(shares)]


def test_memory_near_its_limit_is_reported_once_until_it_is_well_below():
    alerts = alerts_of(memory(0.5, 0.91, 0.89, 0.92, 0.86, 0.84, 0.91))
    assert states(alerts) == [("memory", "raised"), ("memory", "cleared"), ("memory", "raised")]
    assert "GPU 1 on a: 72.8 of 80.0 GiB of memory in use (91 %)" in alerts[0].message


def test_memory_of_the_host_is_watched_without_a_gpu():
    figures = {"mem__host_total_bytes": 100.0 * GIB, "mem__host_used_bytes": 96.0 * GIB}
    (alert,) = alerts_of([sample(0, 0, **figures)])
    assert alert.subject == "host a" and "96.0 of 100.0 GiB" in alert.message


def epochs(peaks: list[float], figure: str = "worker__0__torch_peak_bytes") -> list[Record]:
    """Three samples an epoch, the peak in the middle."""
    return [
        sample(0, 10 * (3 * epoch + part), step=epoch + 1, epoch=epoch, **{figure: peak * GIB * (0.6, 1.0, 0.8)[part]})
        for epoch, peak in enumerate(peaks)
        for part in range(3)
    ]


@pytest.mark.parametrize("figure", ["worker__0__torch_peak_bytes", "worker__0__rss_bytes"])
def test_peaks_that_grow_from_epoch_to_epoch_are_a_leak_until_they_stay(figure):
    growing = [10 + 0.4 * epoch for epoch in range(9)]
    alerts = alerts_of(epochs(growing + [growing[-1]] * 6, figure))
    assert states(alerts) == [("leak", "raised"), ("leak", "cleared")]
    assert "0.40 GiB (3.8 %) an epoch" in alerts[0].message and "worker 0" in alerts[0].subject
    assert alerts[0].step == 7  # as soon as five epochs after the first are over


@pytest.mark.parametrize(
    "peaks",
    [
        [5, 10, 10, 10, 10, 10, 10, 10, 10],  # caches fill in the first epoch
        [10, 10, 10, 12, 12, 12, 12, 12, 12],  # one batch was longer
        [10, 12, 10, 12, 10, 12, 10, 12, 10],
        [10 + 0.1 * epoch for epoch in range(10)],  # 1 %
        [0.1 + 0.9 * LEAK_FLOOR_BYTES / GIB * epoch for epoch in range(10)],
    ],
)
def test_other_shapes_are_no_leak(peaks):
    assert alerts_of(epochs(peaks)) == []


def test_new_processes_begin_with_new_peaks():
    first = epochs([10, 11, 12, 13, 14])
    resumed = {"kind": "event", "event": "resumed", "step": 5, "time": first[-1]["time"]}
    later = [record | {"epoch": record["epoch"] + 5} for record in epochs([15, 16, 17, 18, 19])]
    assert alerts_of([*first, resumed, *later]) == []


def throttled(*reasons: int) -> list[Record]:
    return [
        sample(0, INTERVAL_S * n, gpu__0__throttle_reasons=r, gpu__0__temperature_c=91) for n, r in enumerate(reasons)
    ]


@pytest.mark.parametrize("bits, words", [(0x48, "hardware thermal"), (0x4, "power cap"), (0x8, "slowdown")])
def test_lasting_throttling_is_reported_in_words_with_the_state_of_the_gpu(bits, words):
    alerts = alerts_of(throttled(*[bits] * 10, *[0] * 15))
    assert states(alerts) == [("throttling", "raised"), ("throttling", "cleared")]
    assert words in alerts[0].message and "91 °C" in alerts[0].message


def test_idle_clocks_settings_and_short_peaks_are_no_throttling():
    assert alerts_of(throttled(*[0x1 | 0x2 | 0x10 | 0x100] * 20, *[0x4, 0x4, 0, 0] * 10)) == []


def test_loss_that_is_not_finite_is_reported_once_until_it_stays_finite():
    losses = [1.0, None, 1.0, None, None, 1.0, 1.0, 1.0, None]
    alerts = alerts_of([train(step, step, loss=loss) for step, loss in enumerate(losses, start=1)])
    assert states(alerts) == [("nonfinite_loss", state) for state in ("raised", "cleared", "raised")]
    assert [alert.step for alert in alerts] == [2, 8, 9]
    assert "training.learning_rate" in alerts[0].message


def test_worker_that_stops_reporting_is_reported_once_until_it_reports_again():
    clock, names = Clock(), []
    alerts = Alerts(SETTINGS, INTERVAL_S, clock=clock)
    for worker in (0, 1):
        alerts.take(sample(worker, 0, step=7))
    for clock.now in (100, 119, 121, 180, 300):
        alerts.take(sample(0, clock.now, step=9))
        names += alerts.tick()
    assert [(alert.subject, alert.state) for alert in names] == [("worker 1", "raised")]
    assert "since step 7" in names[0].message and "121 s" in names[0].message
    assert states(alerts.take(sample(1, 301, step=8))) == [("silent_worker", "cleared")]
    assert alerts.tick() == []


def test_silence_after_the_end_and_between_rare_samples_is_no_trouble():
    clock = Clock()
    rare, ended = Alerts(SETTINGS, 100.0, clock=clock), Alerts(SETTINGS, INTERVAL_S, clock=clock)
    rare.take(sample(0, 0))
    ended.take(sample(0, 0))
    ended.take({"kind": "event", "event": "finished", "step": 8, "time": 0.0})
    clock.now = 299
    assert rare.tick() == ended.tick() == []
    clock.now = 301
    assert states(rare.tick()) == [("silent_worker", "raised")]


def test_gpus_of_other_peoples_jobs_are_not_reported():
    full = {f"gpu__{gpu}__mem_used_bytes": 0.96 * GIB for gpu in (0, 1)}
    total = {f"gpu__{gpu}__mem_total_bytes": float(GIB) for gpu in (0, 1)}
    record = sample(0, 0, **full, **total)
    assert {alert.subject for alert in alerts_of([record])} == {"GPU 0 on a", "GPU 1 on a"}
    uuids = {"gpu": "GPU-mine", "gpus": {"0": "GPU-other", "1": "GPU-mine"}}
    assert {alert.subject for alert in alerts_of([record | uuids])} == {"GPU 1 on a"}
    slices = {"gpu": "GPU-of-a-slice", "gpus": {"0": "GPU-other", "1": "GPU-mine"}}
    assert len(alerts_of([record | slices])) == 2, "nothing is left out where the GPU is not known"


# --- as a sink of the watcher


def watch(folder: Path, *new: Record) -> list[Record]:
    """A run that goes on in this folder: writes records and ends. Returns what alerts.jsonl then holds."""
    path = folder / "alerts.jsonl"
    sink = AlertSink(path, SETTINGS, INTERVAL_S)
    watcher = RunWatcher(RunFolder(folder.parent, folder.name), [sink], poll_s=60.0)
    append(sample_file(folder / "monitoring", 0), *new)
    watcher.close()
    return read_metrics(path) if path.exists() else []


def test_file_holds_the_alerts_and_there_is_none_without_trouble(tmp_path):
    assert watch(tmp_path, *memory(0.5)) == [] and not (tmp_path / "alerts.jsonl").exists()
    (record,) = watch(tmp_path, *memory(0.95))
    expected = {"kind": "alert", "name": "memory", "state": "raised", "subject": "GPU 1 on a", "step": 1}
    assert expected.items() <= record.items() and record["time"] > 0 and "GiB" in record["message"]


def test_resumed_run_clears_the_alerts_of_before_and_raises_what_still_holds(tmp_path):
    assert len(watch(tmp_path, *memory(0.95))) == 1
    (tmp_path / "alerts.jsonl").open("a").write("damaged\n")
    sink = AlertSink(tmp_path / "alerts.jsonl", SETTINGS, INTERVAL_S)
    sink.write(memory(0.95)[0])
    sink.close()
    states = [record["state"] for record in RecordTail(tmp_path / "alerts.jsonl").poll()]
    assert states == ["raised", "cleared", "raised"]
