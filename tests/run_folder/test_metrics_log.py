import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from run_folder import metrics_log
from run_folder.metrics_log import MetricsLog, MetricsTail, encode_record, read_metrics


def train(step: int, **values) -> dict:
    return {"kind": "train", "step": step, "loss": 1.0, **values}


def test_records_read_back(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(train(1))
        log.append(train(2, tokens=5))
    records = read_metrics(tmp_path / "m.jsonl")
    assert [(r["step"], r.get("tokens")) for r in records] == [(1, None), (2, 5)]
    assert all(r["time"] > 0 for r in records)


@given(st.lists(st.floats(), max_size=4), st.floats())
def test_every_line_is_valid_json_and_says_what_was_not_finite(values, loss):
    record = json.loads(encode_record({"kind": "train", "step": 1, "loss": loss, "values": values}))
    finite = all(map(math.isfinite, [*values, loss]))
    assert record.get("nonfinite", False) is not finite
    assert (record["loss"] is None) is not math.isfinite(loss)


def test_rewind_drops_what_comes_after_the_step(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        for step in range(1, 6):
            log.append(train(step))
        assert log.rewind(3) == 2
        log.append(train(4, loss=9.0))
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "m.jsonl")][2:] == [(3, 1.0), (4, 9.0)]


def test_partial_last_line_of_a_killed_writer_is_passed_over_and_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(encode_record(train(1)) + b'{"kind":"tra')
    assert [r["step"] for r in read_metrics(path)] == [1]
    with MetricsLog(path) as log:
        log.append(train(2))
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_damaged_line_is_refused_with_its_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(encode_record(train(1)) + b"nonsense\n" + encode_record(train(2)))
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)


def test_tail_follows_a_file_that_appears_late_and_grows_in_pieces(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    assert list(tail.poll()) == []
    line = encode_record(train(1))
    with path.open("wb", buffering=0) as file:
        file.write(line[:5])
        assert list(tail.poll()) == []
        file.write(line[5:])
        assert [r["step"] for r in tail.poll()] == [1]
        assert list(tail.poll()) == []


def test_tail_gives_each_step_once_through_a_rewind(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    with MetricsLog(path) as log:
        for step in (1, 2, 3):
            log.append(train(step))
        assert [r["step"] for r in tail.poll()] == [1, 2, 3]
        log.rewind(1)
        for step in (2, 3, 4):
            log.append(train(step))
        assert [r["step"] for r in tail.poll()] == [4]


def test_live_tail_leaves_history_out_and_shows_repeated_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.append(train(1))
        tail = MetricsTail(path, live=True)
        log.append(train(2))
        assert [r["step"] for r in tail.poll()] == [2]
        log.rewind(1)
        log.append(train(2))
        assert [r["step"] for r in tail.poll()] == [2]


def test_history_larger_than_what_is_read_at_once_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "CHUNK_BYTES", 200)
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(50):
            log.append({"kind": "sample", "step": step})
        tail = MetricsTail(path, live=True)
        assert list(tail.poll()) == []
        log.append({"kind": "sample", "step": 50})
        assert [record["step"] for record in tail.poll()] == [50]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 10_000])
def test_chunks_of_any_size_give_the_same_records(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(metrics_log, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(encode_record(train(step)) for step in range(30)) + b'{"kind":"tr')
    assert [record["step"] for record in MetricsTail(path).poll()] == list(range(30))


def test_poll_ends_where_the_file_did_when_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "CHUNK_BYTES", 1)
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(train(0))
        tail = MetricsTail(log.path)
        steps: list[int] = []
        for record in tail.poll():
            steps.append(record["step"])
            log.append(train(record["step"] + 1))
        assert steps == [0]
        assert next(tail.poll())["step"] == 1


def test_rewind_in_the_middle_of_a_poll_repeats_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "CHUNK_BYTES", 1)
    with MetricsLog(tmp_path / "m.jsonl") as log:
        for step in range(6):
            log.append(train(step))
        tail = MetricsTail(log.path)
        records = tail.poll()
        steps = [next(records)["step"] for _ in range(3)]
        log.rewind(4)
        steps += [record["step"] for record in records]
        log.append(train(5))
        steps += [record["step"] for record in tail.poll()]
        assert steps == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_is_not_taken_for_success(tmp_path, monkeypatch):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
        with pytest.raises(OSError, match="No space left"):
            log.append(train(1))
