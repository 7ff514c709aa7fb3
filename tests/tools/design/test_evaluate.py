"""``esmeray design evaluate``: all of a store is evaluated, or the part that is asked for."""

import json
from pathlib import Path

import pytest

from esmeray.model.export.backbone import export
from tests.structures import structure_store
from tests.tasks.test_diffusion_model import trained


def test_what_is_given_is_evaluated_and_what_is_left_out_is_counted(tmp_path: Path, command):
    export(trained(), tmp_path / "export")
    store = structure_store(tmp_path / "folds", 6, validation_share=0.4)
    held_out = store.validation.size
    given = ["design", "evaluate", tmp_path / "export", "--evaluate.store", store.path, "--evaluate.steps", 2]
    whole = command.done(*given, "--evaluate.output", tmp_path / "all.json")
    assert "evaluated 6 of 6 records; left out: 0 of other parts, 0 without" in whole.err
    assert f"{held_out} of them are the store's validation part" in whole.err
    part = command(*given, "--evaluate.part", "validation", "--evaluate.output", tmp_path / "part.json")
    assert f"evaluated {held_out} of 6 records; left out: {6 - held_out} of other parts" in part.err
    found = [json.loads((tmp_path / name).read_text()) for name in ("all.json", "part.json")]
    assert [(each["part"], each["proteins"]) for each in found] == [("all", 6), ("validation", held_out)]
    assert found[0]["metrics"]["perplexity"]["value"] != pytest.approx(found[1]["metrics"]["perplexity"]["value"])


def test_records_without_a_structure_are_left_out_aloud(tmp_path: Path, command):
    export(trained(), tmp_path / "export")
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n>b\nGAVLIPFW\n")
    structures = f"data structures --data.source {tmp_path / 'a.fasta'} --structures.store {tmp_path / 'none'}"
    predicted = f"--data.predictions.folder {tmp_path / 'predicted'} --data.predictions.on_miss null"
    assert command(f"{structures} {predicted}").code == 0
    outcome = command("design", "evaluate", tmp_path / "export", "--evaluate.store", tmp_path / "none")
    assert outcome.code == 3 and "none of 2 records has a structure" in outcome.err
