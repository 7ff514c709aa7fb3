"""What an earlier version recorded is read by the names of this one, or refused in a line that says what to do."""

import pytest
import yaml

from common.errors import ConfigError
from tests.runs import run_folder, tiny_config
from train_config.loading import dump_config, load_config, load_recorded
from train_config.natures import FIXED, FREE, UNSEEN, on_resume, with_absolute_paths
from train_config.schema import Config
from train_config.service_schema import ServeSection
from training.checkpoints.resuming import Resumption


@pytest.fixture
def earlier(tmp_path):
    """A run whose config has the names of the version before."""
    run = run_folder(tiny_config(tmp_path))
    run.path.mkdir()
    settings = yaml.safe_load(dump_config(tiny_config(tmp_path, training={"precision": "fp32"})))
    del settings["training"]["precision"]
    settings["training"]["amp_dtype"] = "none"
    settings["model"]["diffusion"] |= {"space": "tokens", "autoencoder": None, "self_condition": False}
    settings["monitoring"]["alerts"]["silent_worker_s"] = 60.0
    run.config.write_text(yaml.safe_dump(settings))
    return run


def test_run_of_an_earlier_version_is_resumed_with_the_settings_that_it_had(earlier, tmp_path):
    assert load_recorded(earlier.config).training.precision == "fp32"
    assert Resumption(tiny_config(tmp_path, training={"precision": "fp32"})).check() == []


def test_what_this_version_can_not_do_any_more_is_refused(earlier):
    settings = yaml.safe_load(earlier.config.read_text())
    settings["model"]["diffusion"]["space"] = "latents"
    earlier.config.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=r"model\.diffusion\.space is 'latents', which this version has no more: use"):
        load_recorded(earlier.config)


def test_run_of_function_prediction_of_an_earlier_version_is_refused(earlier):
    earlier.config.write_text(yaml.safe_dump({"name": "function", "homology": {}, "network": {}}))
    with pytest.raises(ConfigError, match=r"of an earlier version, .*can't be resumed: choose another --run\.name"):
        load_recorded(earlier.config)


def test_users_own_file_gets_the_new_name_in_the_error(earlier):
    with pytest.raises(ConfigError, match=r"training\.amp_dtype: no such setting \(it is training\.precision now"):
        load_config(earlier.config)


def test_settings_have_the_nature_of_their_section_but_where_they_have_their_own():
    keys = "model.backbone.heads", "model.backbone.gradient_checkpointing", "wandb.mode", "training.learning_rate"
    assert [on_resume(Config, key) for key in keys] == [FIXED, UNSEEN, UNSEEN, FREE]


def test_paths_become_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    config = tiny_config(tmp_path, data={"stage_dir": "fast"}, model={"backbone": {"source": "weights"}})
    absolute = with_absolute_paths(config)
    assert absolute.data.stage_dir == str(tmp_path / "fast") and absolute.deepspeed.config.startswith("/")
    assert absolute.model.backbone.source == str(tmp_path / "weights")
    assert with_absolute_paths(Config()).model.backbone.source == Config().model.backbone.source


def test_links_to_keys_of_the_service_stay_as_they_lead_elsewhere_on_another_node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "..2026_11_25").mkdir()
    (tmp_path / "keys.yaml").symlink_to("..2026_11_25/keys.yaml")
    settings = {"models": ["weights"], "access": {"keys": "keys.yaml"}}
    assert with_absolute_paths(ServeSection.model_validate(settings)).access.keys == str(tmp_path / "keys.yaml")
