"""A run of stages writes readable files with every finished measurement."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS_ROOT
from benchmarks.harness.comparison import compare_runs, verdict
from benchmarks.harness.runner import Run, read_results, run_stages
from benchmarks.harness.stage import Row, Setting
from esmeray.common.errors import DataError
from esmeray.common.timing import Ratio
from tests.benchmarks.harness.toy_stage import MACHINE, toy_stage


def a_run(folder: Path, command: str = "python -m benchmarks", quick: bool = True, **changes) -> Run:
    return Run(MACHINE, folder, quick, command, **changes)


def test_a_run_writes_json_and_a_table(tmp_path: Path):
    assert run_stages([toy_stage("service")], a_run(tmp_path)) == 0
    (table,) = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert table["samples"] == {"first": {"ours": [30.0], "peer": [10.0], "limit": [60.0]}}
    assert {"date", "command", "revision", "seconds"} <= table.keys()
    assert "torch" in table["versions"]
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| first | ours: 30 MB/s | peer: 10 MB/s | 3 | 3 | 3 | 2 | yes |" in page
    assert "| first | ours: 30 MB/s | limit: 60 MB/s | 0.5 | 0.5 | 0.5 |  |  |" in page
    assert "these values mean nothing" in page and "- records: 7" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_running_one_stage_keeps_the_results_of_the_others(tmp_path: Path):
    run_stages([toy_stage("service"), toy_stage("training")], a_run(tmp_path, "all", quick=False))
    run_stages([toy_stage("service", ours=60.0)], a_run(tmp_path, "service alone", quick=False))
    tables = read_results(tmp_path, MACHINE).tables
    assert [(table.stage, table.command) for table in tables] == [("service", "service alone"), ("training", "all")]
    assert [table.samples["first"]["ours"] for table in tables] == [[60.0] * 3, [30.0] * 3]
    assert "smoke run" not in (tmp_path / "results.md").read_text(encoding="utf-8")
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match="move it away"):
        run_stages([toy_stage("service")], a_run(tmp_path))


def test_ctrl_c_keeps_the_rows_that_are_finished(tmp_path: Path):
    def interrupted(_: Setting) -> Iterator[Row]:
        yield {"what": "copy"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stages([toy_stage("service", interrupted)], a_run(tmp_path))
    assert [table.rows for table in read_results(tmp_path, MACHINE).tables] == [[{"what": "copy"}]]


def test_a_failed_stage_is_reported_and_the_other_stages_still_run(tmp_path: Path, capsys):
    def rows(_: Setting) -> Iterator[Row]:
        yield {"what": "copy", "TB/s": 1.5}
        yield {"what": "product", "verdict": "WRONG: by 2"}

    assert run_stages([toy_stage("service", rows), toy_stage("training")], a_run(tmp_path)) == 1
    assert "verdict WRONG: by 2" in capsys.readouterr().err
    assert run_stages([toy_stage("training", rows)], a_run(tmp_path, minutes=0.0)) == 0, "too late to begin"
    service, training = read_results(tmp_path, MACHINE).tables
    assert service.rows == [{"what": "copy", "TB/s": 1.5}, {"what": "product", "verdict": "WRONG: by 2"}]
    assert training.samples, "measured after the stage that broke"
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| what | TB/s | verdict |" in page
    assert "| copy | 1.5 |  |" in page


def test_runs_give_speed_and_memory_of_the_same_rounds(tmp_path: Path):
    setting = Setting("cpu", False, tmp_path)
    peaks = iter([1.0, 2.0, 4.0, 4.0, 3.0, 6.0])
    runs = {"ours": lambda: (30.0, next(peaks)), "peer": lambda: (10.0, next(peaks))}
    speed, memory = compare_runs(setting, "work", "MB/s", runs)
    assert speed["ratio"] == 3 and speed["reached"] is None
    # In the second round, the peer is measured first.
    assert setting.samples["peak memory, work"] == {"ours": [1.0, 4.0, 3.0], "peer": [2.0, 4.0, 6.0]}
    assert (memory["low"], memory["ratio"], memory["high"]) == (1.0, 2.0, 2.0)


def test_an_interval_that_contains_the_floor_is_within_noise():
    ratios = Ratio(3.0, 2.5, 3.5), Ratio(3.0, 1.5, 3.5), Ratio(1.8, 1.5, 2.5), Ratio(1.0, 0.5, 1.5)
    assert [verdict(ratio, 2.0) for ratio in ratios] == ["yes", "yes, within noise", "no, within noise", "no"]


@pytest.mark.parametrize("folder", sorted(RESULTS_ROOT.glob("*/results.json")), ids=lambda path: path.parent.name)
def test_results_in_the_repository_stay_readable(folder):
    assert read_results(folder.parent, MACHINE).tables
