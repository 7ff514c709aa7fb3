"""How cost grows: curves of a smoke run, measured in processes of their own, drawn and kept as plain values."""

from __future__ import annotations

import io
import json
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks.growth import OPENING, OWN, PLANNING, RECORDS, RESIDENT, STAGE
from benchmarks.growth_plot import PANELS, number_of, png, points_json, points_of
from benchmarks.growth_process import Probes, convert_in_process
from benchmarks.proteins import write_fasta
from benchmarks.results import Results, read_results
from benchmarks.runner import Run, run_stages
from dataset.store.reader import Store
from tests.benchmarks.toy_stage import MACHINE


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a smoke run."""
    folder = tmp_path_factory.mktemp("growth")
    assert run_stages([STAGE], Run(MACHINE, folder, quick=True, command="growth")) == []
    return folder


@pytest.mark.slow
def test_a_run_leaves_the_picture_the_curves_and_the_tables_and_no_store(finished: Path):
    names = ["growth.json", "growth.png", "results.json", "results.md", "results.png"]
    assert sorted(path.name for path in finished.iterdir()) == names
    assert "## growth: own memory by store size" in (finished / "results.md").read_text(encoding="utf-8")
    height, width, _ = matplotlib.image.imread(finished / "growth.png").shape
    assert width > height > 300


@pytest.mark.slow
def test_every_panel_has_its_curves_and_every_curve_its_panel(finished: Path):
    curves = json.loads((finished / "growth.json").read_text())["curves"]
    assert set(curves) == {name for panel in PANELS for name in panel.curves.values()}
    for curve in curves.values():
        places = [point["x"] for point in curve["points"]]
        assert places == sorted(places)
        assert all(0 < point["low"] <= point["median"] <= point["high"] for point in curve["points"])


@pytest.mark.slow
def test_equal_tokens_are_measured_at_every_length(finished: Path):
    cases = {case.case: case for case in read_results(finished, MACHINE).cases}
    assert cases["forward by sequence length, bf16"].facts["tokens of a pass"] == 128
    assert [point.x for point in points_of(cases["forward by sequence length, bf16"])] == [64, 128]


def test_stores_grow_to_ten_million_records():
    assert RECORDS == (10_000, 100_000, 1_000_000, 10_000_000)


def test_a_store_is_made_and_trained_from_in_processes_that_several_values_share(tmp_path: Path):
    fasta, store, report = tmp_path / "in.fasta", tmp_path / "store", tmp_path / "probe.json"
    write_fasta(fasta, ["MKTAYIAKQRQISF", "GAVLIPFW"], 300)
    assert convert_in_process(fasta, store) > 0
    assert len(Store(store)) == 300
    assert len({Store(store).id(index) for index in range(300)}) == 300
    probes = Probes(store, 1, report)
    found = {name: probes.value(name) for name in (RESIDENT, OWN, OPENING, PLANNING)}
    assert found[RESIDENT] >= found[OWN] > 0
    assert found[OPENING] > 0
    assert found[PLANNING] > 0
    assert len(probes._found) == 1
    assert not report.exists()
    probes.value(PLANNING)
    assert len(probes._found) == 2


def test_names_of_points_start_with_their_number():
    assert [number_of(name) for name in ("64 tokens", "10,000,000 records", "35M parameters", "3B parameters")] == [
        64,
        1e7,
        3.5e7,
        3e9,
    ]
    with pytest.raises(ValueError, match="starts with no number"):
        number_of("many records")


def test_a_picture_of_nothing_measured_is_still_a_picture():
    nothing = Results(machine=MACHINE)
    assert matplotlib.image.imread(io.BytesIO(png(nothing))).shape[1] > 300
    assert json.loads(points_json(nothing))["curves"] == {}
