"""Formulas of a backbone's facts are held to the modules that transformers builds."""

import json

import pytest

from model.backbones.facts import backbone_facts, facts_of
from model.backbones.loading import build_backbone
from tests.model.small_models import small_config
from train_config.schema import BackboneSection


@pytest.mark.parametrize("source", ["esm2_t6_8M", "qwen2", "llama"])
def test_facts_of_what_is_drawn_are_those_of_the_built_backbone(source):
    section = BackboneSection(source=source, layers=3, hidden_size=96, heads=2)
    assert backbone_facts(section, 33, pad=1) == facts_of(build_backbone(section, 0, 33, pad=1, empty=True))


@pytest.mark.parametrize(
    "change", [{}, {"position_embedding_type": "absolute"}, {"emb_layer_norm_before": True}], ids=str
)
@pytest.mark.parametrize("frozen", [False, True])
def test_facts_of_an_esm2_folder_are_those_of_the_built_backbone(change, frozen, tmp_path):
    config = small_config("esm", max_position_embeddings=70, **change)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    built = facts_of(build_backbone(BackboneSection(source=str(tmp_path)), 0, 33, empty=True))
    assert backbone_facts(BackboneSection(source=str(tmp_path), frozen=frozen), 33) == built
