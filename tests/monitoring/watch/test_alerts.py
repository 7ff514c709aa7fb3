"""Each problem is reported once with its reason, again only after it has ended, and never for old records."""

from pathlib import Path
from typing import Any

import pytest

from esmeray.monitoring.watch.alerts import AlertSink
from esmeray.run_folder.metrics_log import Record, RecordTail
from tests.monitoring.samples import GIB, sample, train

INTERVAL_S = 10.0  # so that twelve samples are the window of an idle GPU


@pytest.fixture
def alerts_of(tmp_path: Path):
    """Function that passes records to a sink and returns the content of its alerts.jsonl."""

    def write(records: list[Record]) -> list[Record]:
        sink = AlertSink(tmp_path / "alerts.jsonl")
        for record in records:
            sink.write(record)
        sink.close()
        return list(RecordTail(tmp_path / "alerts.jsonl").poll())

    return write


def states(alerts: list[Record]) -> list[tuple[str, str]]:
    return [(alert["name"], alert["state"]) for alert in alerts]


def utilised(*percents: float) -> list[Record]:
    """GPU samples with these utilizations, after a step."""
    samples = [sample(0, INTERVAL_S * number, gpu__0__util=percent) for number, percent in enumerate(percents)]
    return [train(1, 0), *samples]


def test_idle_gpu_is_reported_after_its_window(alerts_of):
    records = utilised(90, *[20] * 13)
    assert alerts_of(records[:-1]) == []
    (alert,) = alerts_of(records)
    assert (alert["name"], alert["state"], alert["subject"]) == ("low_utilization", "raised", "GPU 0 on a")
    assert "20 %" in alert["message"]


def test_utilisation_below_the_threshold_is_reported_once(alerts_of):
    low, about = [30] * 13, [48, 52, 49, 54] * 5
    cycle = [("low_utilization", "raised"), ("low_utilization", "cleared")]
    assert states(alerts_of(utilised(90, *low, *about, *low, 80, *low, 80))) == cycle * 2


def test_an_unused_gpu_that_rests_is_not_reported(alerts_of):
    before_step_1 = [record | {"step": 0} for record in utilised(90, *[1] * 60)]
    resumed = {"kind": "event", "event": "resumed", "step": 1, "time": 100.0}
    between = [*utilised(90, *[20] * 8), resumed, *utilised(90, *[20] * 8)]
    assert alerts_of(utilised(*[0] * 60)) == alerts_of(before_step_1) == alerts_of(between) == []


def memory(*shares: float) -> list[Record]:
    names = {"gpu__1__mem_total_bytes": 80.0 * GIB}
    return [sample(0, s, gpu__1__mem_used_bytes=share * 80 * GIB, **names) for s, share in enumerate(shares)]


def test_memory_near_its_limit_is_reported_once(alerts_of, tmp_path):
    assert alerts_of(memory(0.5)) == [] and not (tmp_path / "alerts.jsonl").exists()
    alerts = alerts_of(memory(0.5, 0.96, 0.94, 0.97, 0.91, 0.89, 0.96))
    assert states(alerts) == [("memory", "raised"), ("memory", "cleared"), ("memory", "raised")]
    assert "GPU 1 on a: 76.8 of 80.0 GiB of memory in use (96 %)" in alerts[0]["message"]
    alert = alerts_of([sample(0, 0, host__mem_total_bytes=100.0 * GIB, host__mem_used_bytes=96.0 * GIB)])[-1]
    assert alert["subject"] == "host a" and "96.0 of 100.0 GiB" in alert["message"]


def test_loss_that_is_not_finite_is_reported_once_until_it_stays_finite(alerts_of):
    losses = [1.0, None, 1.0, None, None, 1.0, 1.0, 1.0, None]
    alerts = alerts_of([train(step, step, loss=loss) for step, loss in enumerate(losses, start=1)])
    assert states(alerts) == [("nonfinite_loss", state) for state in ("raised", "cleared", "raised")]
    assert [alert["step"] for alert in alerts] == [2, 8, 9]
    assert "training.learning_rate" in alerts[0]["message"]


@pytest.mark.parametrize(
    "uuids, gpus",
    [
        ({}, {"0", "1"}),
        ({"gpu": "GPU-mine", "gpus": {"0": "GPU-other", "1": "GPU-mine"}}, {"1"}),
        ({"gpu": "GPU-of-a-slice", "gpus": {"0": "GPU-other", "1": "GPU-mine"}}, {"0", "1"}),
    ],
)
def test_gpus_of_other_jobs_are_not_reported(alerts_of, uuids, gpus):
    metrics: dict[str, Any] = {}
    for gpu in (0, 1):
        metrics |= {f"gpu__{gpu}__mem_used_bytes": 0.96 * GIB, f"gpu__{gpu}__mem_total_bytes": float(GIB)}
    alerts = alerts_of([sample(0, 0, **metrics) | uuids])
    assert {alert["subject"] for alert in alerts} == {f"GPU {gpu} on a" for gpu in gpus}


def test_a_resumed_run_clears_the_alerts_of_before(alerts_of, tmp_path):
    (record,) = alerts_of(memory(0.95))
    assert {"kind": "alert", "step": 1, "subject": "GPU 1 on a"}.items() <= record.items() and record["time"] > 0
    (tmp_path / "alerts.jsonl").open("a").write("damaged\n")
    assert [record["state"] for record in alerts_of(memory(0.95))] == ["raised", "cleared", "raised"]
