"""Records are written whole or not at all; a run's records are followed in the order of their times."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.run_folder import metrics_log
from esmeray.run_folder.metrics_log import MetricsLog, Record, RecordTail, RunTail, encode_record, read_metrics
from esmeray.run_folder.paths import RunFolder, sample_file
from tests.damage import flipped, flips
from tests.monitoring.samples import append, sample, train


@given(st.lists(st.floats(), max_size=4), st.floats())
def test_every_line_is_valid_json_and_says_what_was_not_finite(values, loss):
    record = json.loads(encode_record({"kind": "train", "step": 1, "loss": loss, "values": values}))
    finite = all(map(math.isfinite, [*values, loss]))
    assert record.get("nonfinite", False) is not finite
    assert (record["loss"] is None) is not math.isfinite(loss)


def test_partial_last_line_of_a_killed_writer_is_passed_over_and_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(encode_record(train(1, 1)) + b'{"kind":"tra')
    assert [r["step"] for r in read_metrics(path)] == [1]
    with MetricsLog(path) as log:
        log.append(train(2, 2))
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_flipped_bit_is_refused_or_leaves_the_record_as_it_is(tmp_path):
    path, record = tmp_path / "m.jsonl", train(1, 1)
    path.write_bytes(2 * encode_record(record))  # a killed writer leaves an incomplete last line
    for bit in flips(path, 400, seed=1):
        with flipped(path, bit):
            try:
                assert record.items() <= read_metrics(path)[0].items(), bit
            except DataError as error:
                assert re.search("line [12]", str(error))


def test_a_full_disk_is_not_taken_for_success(tmp_path, monkeypatch):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        monkeypatch.setattr(log, "_file", SimpleNamespace(write=lambda data: len(data) - 1, close=log._file.close))
        with pytest.raises(OSError, match=r"No space left.*m\.jsonl"):
            log.append(train(1, 1))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path.parent, tmp_path.name)


def times(records: Iterable[Record]) -> list[float]:
    return [record["time"] - 1.7e9 for record in records]


def test_records_of_all_files_come_by_time(run):
    append(sample_file(run.monitoring, 0), sample(0, 0))
    tail = RunTail(run, live=True)
    assert list(tail.poll()) == []
    append(run.metrics, train(1, 2), train(2, 5))
    append(sample_file(run.monitoring, 1), sample(1, 1), sample(1, 6))
    append(sample_file(run.monitoring, 0), sample(0, 3))
    append(run.alerts, {"kind": "alert", "step": 1, "time": 1.7e9 + 4, "name": "memory", "state": "raised"})
    assert times(tail.poll()) == [1, 2, 3, 4, 5, 6]


def test_damaged_line_is_reported_once_and_costs_no_other(run):
    path = sample_file(run.monitoring, 0)
    warnings: list[str] = []
    tail = RunTail(run, warn=warnings.append)
    append(path, sample(0, 1))
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    append(path, sample(0, 2), sample(0, 3))
    append(run.metrics, train(1, 4))
    assert times(tail.poll()) == [1, 2, 3, 4]
    assert len(warnings) == 1 and "worker-00000.jsonl" in warnings[0] and "nonsense" in warnings[0]


def steps(records: Iterable[Record]) -> list[int]:
    return [record["step"] for record in records]


def test_steps_repeated_by_a_resumed_run_are_given_again(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.append(train(1, 1))
        log.append(train(2, 2))
        tail = RecordTail(path, skip_present=True)
        assert steps(tail.poll()) == []
        log.append(train(3, 3))
        assert steps(tail.poll()) == [3]
        log.rewind(2)
        assert steps(tail.poll()) == []
        log.append(train(3, 9))
        assert steps(tail.poll()) == [3]
    with path.open("ab") as file:
        file.write(b'{"kind":"tra')  # killed; the next writer replaces the file
    append(path, train(4, 10))
    assert steps(tail.poll()) == [4]


def test_long_file_is_read_at_its_beginning_and_end_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "HEAD_BYTES", 300)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(encode_record(train(step, step)) for step in range(1, 1001)))
    tail = RecordTail(path, recent_bytes=1000)
    given = steps(tail.poll())
    assert (given[0], given[-1], tail.problem) == (1, 1000, "")
    assert len(given) < 30
    append(path, train(1001, 1001))
    assert steps(tail.poll()) == [1001]
