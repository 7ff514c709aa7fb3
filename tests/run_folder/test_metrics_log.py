import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from run_folder.metrics_log import MetricsLog, encode_record, read_metrics


def train(step: int, **values) -> dict:
    return {"kind": "train", "step": step, "loss": 1.0, **values}


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


def test_a_full_disk_is_not_taken_for_success(tmp_path, monkeypatch):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
        with pytest.raises(OSError, match="No space left"):
            log.append(train(1))
