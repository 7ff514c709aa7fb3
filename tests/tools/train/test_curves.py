"""``train curves`` plots the losses of several runs."""

import pytest

from esmeray.run_folder.metrics_log import MetricsLog


def loss(step: int, value: float | None, time: float, kind: str = "train") -> dict:
    tokens = {"tokens_seen": 100 * step, "step_s": 2.0} if kind == "train" else {}
    return {"kind": kind, "step": step, "loss": value, "time": time, **tokens}


def write(folder, *records: dict) -> None:
    with MetricsLog(folder / "metrics.jsonl") as log:
        for record in records:
            log.append(record)


@pytest.fixture
def runs(tmp_path):
    losses = [loss(step, 3.0 / step, 2.0 * step) for step in range(1, 30)]
    write(tmp_path / "a", *losses, loss(29, 0.2, 60.0, "validation"))
    before = [loss(1, 3.0, 2.0), loss(1, 2.9, 5.0, "validation")]
    resumed = {"kind": "event", "step": 1, "event": "resumed", "time": 5000.0}
    write(tmp_path / "b", *before, resumed, loss(2, None, 9000.0), loss(3, 2.0, 9004.0))
    return [tmp_path / "a", tmp_path / "b"]


def test_runs_are_drawn_over_time_and_tokens_and_a_pause_does_not_count(command, runs, tmp_path, saved_figures):
    command.done("train", "curves", *runs, "--output", tmp_path / "out.png")
    over_time, over_tokens = saved_figures[0].axes
    assert [text.get_text() for text in over_time.get_legend().get_texts()] == ["a", "b"]
    b_train, b_validation = over_time.lines[2:]
    assert list(b_train.get_xdata()) == pytest.approx([2 / 60, 7 / 60, 11 / 60])
    assert list(over_tokens.lines[2].get_xdata()) == [100, 200, 300]
    assert list(b_validation.get_xdata()) == pytest.approx([5 / 60])


def test_a_picture_is_replaced_when_asked_alone_and_names_have_to_differ(command, runs, tmp_path):
    words = ("train", "curves", *runs, "--output", tmp_path / "out.png")
    assert [command(*words).code, command(*words).code, command(*words, "--overwrite").code] == [0, 2, 0]
    command.refused(2, "a: two runs have this name", "train", "curves", runs[0], runs[0])
    command.refused(2, "missing: RUN; for example: esmeray train curves runs/first", "train", "curves")
