"""A run leaves files that can be read, of everything that was finished."""

import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks.__main__ import RESULTS_ROOT
from benchmarks.harness import runner
from benchmarks.harness.results import read_results
from benchmarks.harness.runner import Run, run_stages
from benchmarks.harness.stage import Case, Contender, Row, Setting, WrongWorkError
from esmeray.common.errors import DataError
from tests.benchmarks.harness.toy_stage import MACHINE, constant, toy_stage


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test looks at it; it takes a second after each case."""
    monkeypatch.setattr(runner, "_draw", lambda run: None)


def a_run(folder: Path, command: str = "python -m benchmarks", quick: bool = True, **changes) -> Run:
    return Run(MACHINE, folder, quick, command, ["conversion", "loading"], **changes)


def test_a_run_writes_json_a_table_and_a_picture_of_those_who_took_part(tmp_path: Path):
    assert run_stages([toy_stage("conversion")], a_run(tmp_path)) == []
    written = json.loads((tmp_path / "results.json").read_text())
    assert [case["case"] for case in written["cases"]] == ["first", "second"]
    assert written["cases"][0]["contenders"][0]["samples"] == [30.0]
    assert {"date", "command", "revision", "warm_up"} <= written["cases"][0].keys()
    assert "torch" in written["cases"][0]["versions"]
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| conversion | first | ours: 30 MB/s | peer: 10 MB/s | **3.00** | 3.00 to 3.00 | 2.00 | yes |" in page
    assert "these values mean nothing" in page
    height, width, _ = matplotlib.image.imread(tmp_path / "results.png").shape
    assert width > height > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md", "results.png"]
    first, second = read_results(tmp_path, MACHINE).cases
    assert [comparison.peer for comparison in first.comparisons] == ["peer", "20 MB/s"]
    assert second.comparisons == []
    number = first.comparisons[1]
    assert (number.ratio, number.floor, number.verdict) == (1.5, None, "no floor")


@pytest.mark.usefixtures("no_picture")
def test_naming_a_stage_measures_it_again_and_leaves_the_others_as_they_are(tmp_path: Path):
    run_stages([toy_stage("loading"), toy_stage("conversion")], a_run(tmp_path, "all"))
    run_stages([toy_stage("loading", ours=60.0)], a_run(tmp_path, "loading alone"))
    cases = read_results(tmp_path, MACHINE).cases
    assert [case.case for case in cases] == ["first", "second"] * 2
    assert [case.command for case in cases] == ["all", "all", "loading alone", "loading alone"]
    assert [case.contenders[0].median for case in cases] == [30.0, 30.0, 60.0, 60.0]
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match="move it away"):
        run_stages([toy_stage("conversion")], a_run(tmp_path))


@pytest.mark.usefixtures("no_picture")
def test_ctrl_c_keeps_the_cases_that_are_finished(tmp_path: Path):
    def interrupted(_: Setting) -> Iterator[Case]:
        yield Case("first", "MB/s", (constant("ours", 1.0), constant("peer", 1.0)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stages([toy_stage("conversion", interrupted)], a_run(tmp_path))
    assert [case.case for case in read_results(tmp_path, MACHINE).cases] == ["first"]


@pytest.mark.usefixtures("no_picture")
def test_rows_of_a_stage_without_peers_are_written_as_they_come_and_a_wrong_one_breaks_it(tmp_path: Path, capsys):
    def rows(_: Setting) -> Iterator[Row]:
        yield {"what": "copy", "TB/s": 1.5}
        yield {"what": "product", "verdict": "WRONG: by 2"}

    def check() -> dict:
        raise WrongWorkError("the ids differ")

    def wrong(_: Setting) -> Iterator[Case]:
        yield Case("first", "MB/s", (constant("ours", 1.0), constant("peer", 1.0)), check=check)

    stages = [toy_stage("conversion", rows), toy_stage("loading")]
    assert run_stages(stages, a_run(tmp_path)) == ["conversion"]
    assert "verdict WRONG: by 2" in capsys.readouterr().err
    assert run_stages([toy_stage("loading", wrong)], a_run(tmp_path, minutes=0.0)) == [], "too late to begin"
    (table,) = read_results(tmp_path, MACHINE).tables
    assert table.rows == [{"what": "copy", "TB/s": 1.5}, {"what": "product", "verdict": "WRONG: by 2"}]
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| what | TB/s | verdict |" in page
    assert "| copy | 1.5 |  |" in page
    assert run_stages([toy_stage("conversion", wrong)], a_run(tmp_path)) == ["conversion"]
    assert "conversion: the ids differ" in capsys.readouterr().err


@pytest.mark.usefixtures("no_picture")
def test_a_full_run_warms_rates_up_by_the_short_work_where_there_is_some(tmp_path: Path):
    calls: list[str] = []
    contender = Contender("a", lambda: calls.append("long") or 1.0, short=lambda: calls.append("short") or 1.0)

    def cases(_: Setting) -> Iterator[Case]:
        yield Case("first", "u", (contender,), rounds=2)

    run_stages([toy_stage("conversion", cases)], a_run(tmp_path, quick=False))
    assert set(calls[:-2]) == {"short"}
    assert calls[-2:] == ["long", "long"]
    (case,) = read_results(tmp_path, MACHINE).cases
    assert case.contenders[0].warm_up_settled is not None
    assert "agree within 2%" in case.warm_up
    assert "smoke run" not in (tmp_path / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", sorted(RESULTS_ROOT.glob("*/results.json")), ids=lambda path: path.parent.name)
def test_results_in_the_repository_stay_readable(folder):
    assert read_results(folder.parent, MACHINE).cases
