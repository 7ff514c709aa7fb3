import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.tools.train.export import main


def test_last_checkpoint_exports_as_the_run_did_at_its_end(artifacts, tmp_path):
    run = artifacts.autoencoder
    assert main([str(run.path), "--export.output", str(tmp_path / "model")]) == 0
    files = sorted(path.name for path in run.export.glob("*.safetensors"))
    assert files and files == sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    for name in files:
        actual, expected = (load_file(folder / name) for folder in (tmp_path / "model", run.export))
        assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)
    assert (tmp_path / "model" / "config.yaml").exists()
    assert "Steps" in (tmp_path / "model" / "README.md").read_text()


def test_any_checkpoint_can_be_named(artifacts, tmp_path):
    run = Path(shutil.copytree(artifacts.autoencoder.path, tmp_path / "run"))
    assert main([str(run), "--export.checkpoint", "step-00000004"]) == 0
    assert (run / "export-step-00000004" / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="no checkpoint step-9; available: step-00000008, step-00000004"):
        main([str(run), "--export.checkpoint", "step-9"])
    with pytest.raises(ConfigError, match="not a run folder"):
        main([str(tmp_path)])
