import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from common.errors import CheckpointError, ConfigError
from dataset.store.conversion import ensure_store
from tests.runs import run_folder, tiny_config
from tools.export import main
from train_config.loading import dump_config
from training.engine.context import WorkerContext
from training.loop.worker import train_worker


@pytest.fixture(scope="module")
def run(process_group, tmp_path_factory):
    """A finished tiny run."""
    config = tiny_config(tmp_path_factory.mktemp("runs"))
    folder = run_folder(config)
    folder.path.mkdir()
    folder.config.write_text(dump_config(config))
    train_worker(config, WorkerContext(), str(ensure_store(config.data, folder.path.parent / "stores")))
    return folder


def tensors(folder):
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_last_checkpoint_exports_as_the_run_did_at_its_end(run, tmp_path):
    assert main([str(run.path), "--output", str(tmp_path / "model")]) == 0
    expected, actual = tensors(run.export), tensors(tmp_path / "model")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert (tmp_path / "model" / "config.yaml").exists()
    assert "Steps" in (tmp_path / "model" / "README.md").read_text()


def test_any_checkpoint_can_be_named(run):
    assert main([str(run.path), "--checkpoint", "step-00000004"]) == 0
    assert (run.path / "export-step-00000004" / "model.safetensors").exists()


def test_unknown_checkpoint_is_refused_with_those_there_are(run):
    with pytest.raises(CheckpointError, match=r"no checkpoint step-9; there are step-00000008, step-00000004"):
        main([str(run.path), "--checkpoint", "step-9"])


def test_an_existing_export_is_replaced_only_when_asked(run, tmp_path):
    arguments = [str(run.path), "--output", str(tmp_path / "model")]
    assert main(arguments) == 0
    before = (tmp_path / "model").stat().st_ino
    with pytest.raises(ConfigError, match="exists already; choose another name or pass --overwrite"):
        main(arguments)
    assert main([*arguments, "--overwrite"]) == 0
    assert (tmp_path / "model").stat().st_ino != before


@pytest.mark.parametrize("kind", ["notes", "export with notes", "file", "link"])
def test_what_is_no_export_is_never_replaced(run, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("training.checkpoints.consolidation.full_precision_state", None)  # nothing may get so far
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("a table")
    elif kind == "link":
        target.symlink_to(run.export)
    else:
        shutil.copytree(run.export, target) if kind == "export with notes" else target.mkdir()
        (target / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"was not made by export|holds notes.txt|symbolic link"):
        main([str(run.path), "--output", str(target), "--overwrite"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_every_file_of_a_run_is_readable_as_the_umask_says(run):
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o666 for path in run.path.rglob("*") if path.is_file()}
    assert "model.safetensors" in modes
    assert {name for name, mode in modes.items() if mode & 0o444 != 0o444 & ~umask} == set()


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run there"):
        main([str(tmp_path)])
