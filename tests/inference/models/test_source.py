"""A model's task comes from its manifest, without guessing; a flipped bit of any file is detected or harmless."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import MADE_FILE
from esmeray.dataset.tokens.model_folder import local_folder
from esmeray.inference.models.source import ModelSource, exported_by, find_model
from esmeray.model.export.exported_folder import MODEL_FILE
from tests.classifiers import export_tiny
from tests.damage import flipped, refuse_silence
from tests.inference.models.opened import opened, rows_of


def test_a_run_and_its_export_are_one_model_and_a_size_is_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    folder = export_tiny(run / "export")
    assert find_model(run) == ModelSource(str(run), str(folder), "classifier")
    assert find_model(folder) == ModelSource(str(folder), str(folder), "classifier")
    assert find_model("esm2_t6_8M") == ModelSource("esm2_t6_8M", "esm2_t6_8M", None, random_weights=True)
    assert find_model("facebook/esm2_t6_8M_UR50D").task is None
    monkeypatch.chdir(tmp_path)
    Path("bert").mkdir()  # a folder with the name of a size is not the size
    assert find_model("./bert") == ModelSource("./bert", str(tmp_path / "bert"), None)


def test_a_manifest_that_is_damaged_or_of_a_later_version_is_refused(tmp_path: Path):
    folder = export_tiny(tmp_path / "export")
    (folder / MADE_FILE).unlink()  # otherwise the checksum would be refused first
    for task, version, message in [
        ("classifier", 2, "has format version 2, but this version of Esmeray reads 1; export the model"),
        (1, 1, r"esmeray_model\.json: damaged \("),
        ("translation", 1, "the model's task translation is not installed"),
    ]:
        (folder / MODEL_FILE).write_text(json.dumps({"task": task, "format_version": version}))
        with pytest.raises(DataError, match=message):
            opened(folder)


def test_a_model_of_another_task_is_refused_with_what_to_do(tmp_path: Path):
    folder = export_tiny(tmp_path / "export")
    with pytest.raises(ConfigError, match=r"a model of task classifier; give a run of model.task diffusion"):
        exported_by("diffusion", folder)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"is a run without an export.* run 'esmeray train export .*'"):
        find_model(tmp_path / "unfinished")


def test_a_name_beside_runs_is_none_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs" / "labels").mkdir(parents=True)
    (tmp_path / "runs" / "labels" / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run runs/label not found \(did you mean labels\?\)"):
        find_model("runs/label")
    monkeypatch.chdir(tmp_path / "runs")
    assert local_folder("esm2_t6_8M", "model") is None


def read(folder: Path) -> Any:
    model = opened(folder)
    return [model.facts.fingerprint, rows_of(model, ["MKTAYIAK"])["mean"].numpy()]


def test_a_flipped_bit_of_an_export_is_noticed(tmp_path: Path):
    folder = export_tiny(tmp_path / "model")
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            assert refuse_silence(path, lambda: read(folder), 1) == 1 or path.suffix != ".safetensors"


def test_an_export_without_its_list_of_files_opens(tmp_path: Path):
    folder = export_tiny(tmp_path / "model")
    wanted = read(folder)[0]
    copied = shutil.copytree(folder, tmp_path / "hub", ignore=shutil.ignore_patterns(MADE_FILE))
    assert read(copied)[0] == wanted
    words = (
        r"model\.safetensors: damaged: .*; build or copy .* again; if you changed it yourself, remove its "
        r"esmeray.json"
    )
    with flipped(folder / "model.safetensors", 50_000), pytest.raises(DataError, match=words):
        read(folder)
