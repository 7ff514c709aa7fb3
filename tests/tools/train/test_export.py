import pytest
import torch
from safetensors.torch import load_file

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.tools.train.export import main
from tests.runs import run_folder, tiny_config
from tests.training.runs import finish


@pytest.fixture(scope="module")
def run(process_group, tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("runs"))
    finish(config)
    return run_folder(config)


def test_last_checkpoint_exports_as_the_run_did_at_its_end(run, tmp_path):
    assert main([str(run.path), "--export.output", str(tmp_path / "model")]) == 0
    files = sorted(path.name for path in run.export.glob("*.safetensors"))
    assert files and files == sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    for name in files:
        actual, expected = (load_file(folder / name) for folder in (tmp_path / "model", run.export))
        assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)
    assert (tmp_path / "model" / "config.yaml").exists()
    assert "Steps" in (tmp_path / "model" / "README.md").read_text()


def test_any_checkpoint_can_be_named(run, tmp_path):
    assert main([str(run.path), "--export.checkpoint", "step-00000004"]) == 0
    assert (run.path / "export-step-00000004" / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="no checkpoint step-9; available: step-00000008, step-00000004"):
        main([str(run.path), "--export.checkpoint", "step-9"])
    with pytest.raises(ConfigError, match=r"not a run folder"):
        main([str(tmp_path)])
