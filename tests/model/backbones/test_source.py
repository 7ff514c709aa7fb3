"""Sources of a backbone are distinguished, and each wrong one is refused in a line that says what to do."""

import pytest

from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.model.backbones.architectures import read_config
from esmeray.model.backbones.source import config_folder, weights_folder
from esmeray.model.section import BackboneSection


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "esm2_t6_8m"}, "did you mean esm2_t6_8M"),
        ({"source": "resnet"}, "sizes are esm2_t6_8M"),
        ({"source": "./nowhere"}, "there is no folder"),
        ({"source": "esm2_t6_8M", "hidden_size": 64}, r"64 can't be split over 20 heads.*one of \[1, 2, 4, 8, 16, 32"),
        ({"source": "esm2_t6_8M", "hidden_size": 20}, "even number of channels"),
        ({"source": "brt"}, "did you mean bert"),
        ({"source": "facebook/esm2_t6_8M_UR50D", "layers": 2}, "layers can't be set for loaded weights"),
    ],
)
def test_an_impossible_source_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        read_config(BackboneSection(**settings), 33, 1)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_config_that_can_be_read_is_refused(tmp_path):
    config = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(BackboneSection(source=str(tmp_path)), 33, 1)
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
        config.write_bytes(content)
        with pytest.raises(
            DataError, match=r"^.*config\.json: damaged \(.+\); give another model\.backbone\.source, .*$"
        ):
            read_config(BackboneSection(source=str(tmp_path)), 33, 1)
    with pytest.raises(ConfigError, match="is a file"):
        read_config(BackboneSection(source=str(config)), 33, 1)


def test_an_unreachable_hub_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for look in (config_folder, weights_folder):
        with pytest.raises(ResourceError, match="hub can't be reached") as refusal:
            look(BackboneSection(source="esmeray-tests/not-there"))
        assert "\n" not in str(refusal.value)
