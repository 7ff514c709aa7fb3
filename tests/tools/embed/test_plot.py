import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import same_color

from esmeray.inference.embedding.map import SEARCH
from tests.embeddings import make_embeddings, random_vectors

IDS = [f"sp|P{n:03}" for n in range(120)]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_embeddings(tmp_path / "vectors", random_vectors(120, 6), IDS)
    return tmp_path


def traces(page: Path) -> list[dict]:
    text = page.read_text()
    start = text.index("[", text.rindex("Plotly.newPlot("))
    return json.JSONDecoder().raw_decode(text, start)[0]


def plotted(command, *arguments) -> list[dict]:
    command.done("embed", "plot", "vectors", "--plot.output", "plot", *arguments)
    assert Path("plot/embeddings.png").exists()
    return traces(Path("plot/embeddings.html"))


def test_the_page_has_every_id_a_search_box_and_needs_no_network(command, here):
    points, found = plotted(command)
    assert (points["text"], found["x"]) == (IDS, [])
    assert [residues for residues, _ in points["customdata"]] == list(range(10, 130))
    text = (here / "plot" / "embeddings.html").read_text()
    assert "part of an id" in text and "document.getElementById('plot')" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)


def test_picture_and_page_have_each_class_at_the_same_places_in_its_colour(command, here, saved_figures):
    table = pd.DataFrame({"id": [*IDS[:90], "unknown"], "place": [*["in", "in", "_out"] * 30, "in"]})
    table.to_parquet("labels.parquet")
    options = "--plot.labels labels.parquet --plot.label_column place"
    *classes, _ = plotted(command, *options.split())
    assert (classes[0]["text"], classes[0]["customdata"][0]) == (IDS[90:], [100, "no label"])
    assert len({trace["marker"]["color"] for trace in classes}) == 3
    (axes,) = saved_figures[0].axes
    on_page = [np.stack([trace["x"], trace["y"]], axis=1) for trace in classes]
    for drawn, wanted, trace in zip(axes.collections, on_page, classes, strict=True):
        np.testing.assert_allclose(drawn.get_offsets(), wanted, atol=1e-4)
        assert same_color(drawn.get_facecolor()[0], trace["marker"]["color"])
    (legend,) = saved_figures[0].legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [trace["name"] for trace in classes] == ["no label (30)", "in (60)", "_out (30)"]
    handles = zip(legend.legend_handles, classes, strict=True)
    assert all(same_color(handle.get_color(), trace["marker"]["color"]) for handle, trace in handles)


def test_of_many_classes_the_largest_are_named_and_numbers_are_a_scale(command, here):
    names = [f"class {min(n % 30, 20)}" for n in range(120)]
    pd.DataFrame({"id": IDS, "label": names}).to_csv("labels.csv", index=False)
    *classes, _ = plotted(command, "--plot.labels", "labels.csv")
    assert len(classes) == 12
    assert classes[0]["name"] == "other (40)" and classes[1]["name"] == "class 20 (40)"
    pd.DataFrame({"id": IDS[:100], "label": np.linspace(0, 1, 100)}).to_csv("labels.csv", index=False)
    without, numbers, _ = plotted(command, "--plot.labels", "labels.csv", "--overwrite")
    assert without["name"] == "no label (20)"
    assert numbers["marker"]["colorbar"]["title"]["text"] == "label"


def test_a_sample_is_the_same_each_time_and_reported(command, here):
    first = plotted(command, "--plot.max_points", 50)[0]
    outcome = command.done("embed plot vectors --plot.output again --plot.max_points 50")
    assert traces(here / "again" / "embeddings.html")[0] == first and len(first["text"]) == 50
    for text in (outcome.out, (here / "plot" / "embeddings.html").read_text()):
        assert "a random sample of 50 of 120 proteins" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_search_box_marks_the_ids_that_hold_its_text(tmp_path):
    program = """
    const made = [], data = [{text: ['Aa', 'b'], x: [1, 2], y: [3, 4]}, {text: ['ba'], x: [5], y: [6]}, {}];
    const page = {before() {}, data}, create = () => (made.push({}), made.at(-1));
    const document = {body: {style: {}}, getElementById: () => page, createElement: create};
    const Plotly = {restyle: (_, change, traces) => console.log(JSON.stringify([change, traces]))};
    SEARCH
    for (const value of [' A ', '']) { made[0].value = value; made[0].oninput(); console.log(made[1].textContent); }
    """
    script = program.replace("SEARCH", SEARCH)
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ['[{"x":[[1,5]],"y":[[3,6]]},[2]]', "2 found", '[{"x":[[]],"y":[[]]},[2]]', ""]


def test_mistakes_are_one_line(command, here, monkeypatch):
    make_embeddings(here / "residues", random_vectors(9, 4), per="residue")
    make_embeddings(here / "single", random_vectors(1, 4))
    pd.DataFrame({"id": ["x"], "label": ["in"]}).to_csv("others.csv", index=False)
    pd.DataFrame({"id": [IDS[0]] * 2, "label": ["in", "out"]}).to_csv("twice.csv", index=False)
    Path("broken.parquet").write_text("no table")
    monkeypatch.setattr("esmeray.tools.embed.plot.find_spec", lambda name: None)
    for arguments, code, words in [
        ("residues --plot.output plot", 3, "has values per residue"),
        ("single --plot.output plot", 3, "at least two proteins"),
        ("vectors --plot.output plot --plot.method umap", 2, "pip install umap-learn"),
        ("vectors --plot.output plot --plot.labels broken.parquet", 3, "broken.parquet: not Parquet"),
        ("vectors --plot.output plot --plot.labels others.csv", 3, "only 0 of 120 ids match others.csv: 'sp|P000'"),
        ("vectors --plot.output plot --plot.labels twice.csv", 3, "duplicate id 'sp|P000'"),
        ("vectors --plot.output plot --plot.labels others.csv --plot.label_column place", 3, "'place'"),
    ]:
        command.refused(code, words, f"embed plot {arguments}")
    assert not (here / "plot").exists()
