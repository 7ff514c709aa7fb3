"""Rows of W&B's history: every metric of every worker and node, drawn against step or time."""

from fnmatch import fnmatch

from esmeray.monitoring.sampling.metric_names import METRICS
from esmeray.monitoring.sinks.wandb_follower import AXES, WandbRows
from tests.monitoring.samples import BEGAN_S, sample, train


def test_one_run_holds_every_metric_of_both_workers_and_nodes_against_its_axis():
    rows = WandbRows(alerts_from_s=0.0, name_nodes=True)
    records = [
        train(1, 0),
        *(
            sample(w, 5 + w, host="ab"[w]) | {"metrics": {m.name.format(gpu=w, worker=w): float(w) for m in METRICS}}
            for w in (0, 1)
        ),
        {"kind": "alert", "step": 1, "time": BEGAN_S + 9, "name": "memory", "state": "raised", "message": ""},
        {"kind": "event", "step": 1, "time": BEGAN_S + 9, "event": "finished"},
    ]
    made = [rows.row(record).values for record in records]
    shown = {name for values in made for name in values}
    for metric in METRICS:
        first, second = (metric.name.format(gpu=index, worker=index) for index in (0, 1))
        if metric.name.startswith("worker/"):
            assert {first, second} <= shown
        elif not metric.name.startswith(("perf/", "train/")):
            assert {first, f"node/b/{second}"} <= shown
    for values in made:
        axis = "elapsed_s" if "elapsed_s" in values else "step"
        for name in values:
            if "/" in name and not name.startswith("position/"):
                assert any(fnmatch(name, pattern) for pattern in AXES[axis]), name
    assert [values["elapsed_s"] for values in made if "elapsed_s" in values] == [5, 6, 9]
    assert [values["_timestamp"] for values in made][:2] == [BEGAN_S, BEGAN_S + 5]
