"""Settings know what a resumed run may change, and paths among them mean the same on every node."""

from esmeray.service.section import ServeSection
from esmeray.train_config.natures import FIXED, FREE, UNSEEN, on_resume, with_absolute_paths
from esmeray.training.config import Config
from tests.runs import tiny_config


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
