"""Removed settings are ignored if they have their former default or are in a run's file, and refused otherwise."""

import importlib
import json
import pkgutil

import pytest

import esmeray
from esmeray.common.errors import ConfigError
from esmeray.train_config import removed
from esmeray.train_config.removed import REMOVED, removed_settings, stored_in, without_removed
from esmeray.train_config.section import Section
from esmeray.training.config import load_config


def _sections(base: type = Section):
    yield base
    for section in base.__subclasses__():
        yield from _sections(section)


@pytest.fixture(scope="module")
def sections():
    """Every section class by its name."""
    for module in pkgutil.walk_packages(esmeray.__path__, "esmeray."):
        if module.name.rpartition(".")[2] == "section" or ".tools." in module.name:
            importlib.import_module(module.name)
    return {section.__name__: section for section in _sections()}


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in REMOVED for name in REMOVED[section]])
def test_removed_setting_is_accepted_if_default_or_in_a_stored_file(section, name, sections, caplog):
    removed._warn.cache_clear()
    former = REMOVED[section][name]
    assert removed_settings(sections[section])[name] == former, f"{section} has {name}"
    assert json.dumps(former)  # messages contain the value
    assert without_removed(sections[section], {name: former}, None) == {}
    assert without_removed(sections[section], {name: "x"}, None) == {name: "x"}
    for _ in range(2):
        assert without_removed(sections[section], {name: "x"}, stored_in("config.yaml")) == {}
    assert len(caplog.messages) == 1 and f"config.yaml: settings that were removed are ignored: {{'{name}': 'x'}}" in (
        caplog.text
    )


def test_removed_setting_of_a_file_is_refused_by_line_or_read_from_a_run(tmp_path, caplog):
    path = tmp_path / "config.yaml"
    path.write_text("training:\n  epochs: 3\n  tf32: true\n")
    assert load_config(path).training.epochs == 3 and not caplog.messages
    path.write_text("training:\n  epochs: 3\n  tf32: false\n")
    message = r"config.yaml:3: training.tf32: was removed; its value is now true; delete the line$"
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    assert load_config(path, is_stored=True).training.epochs == 3
    assert len(caplog.messages) == 1
