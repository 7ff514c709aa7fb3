"""An architecture of transformers that no line names becomes a backbone by one line."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from esmeray.common.errors import ConfigError
from esmeray.model.backbones import architectures
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.section import BackboneSection
from tests.model.support import batch_of_lengths


def test_new_backbone_is_one_line_and_attends_within_each_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("olmo", vocab_size=64, intermediate_size=64, pad_token_id=1, **sizes)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "olmo")
    section = BackboneSection(source=str(tmp_path / "olmo"))
    with pytest.raises(ConfigError, match=r"set model\.backbone\.padded true"):
        build_backbone(section, 0, 64, 1)
    monkeypatch.setitem(architectures.PACKED, "olmo", True)
    backbone = build_backbone(section, 0, 64, 1).eval()
    together, alone = batch_of_lengths([7, 4]), batch_of_lengths([4])
    assert backbone.causal
    torch.testing.assert_close(backbone(together)[7:], backbone(alone))
