"""Esmeray's ESM-2 has the same weights as transformers' for a seed, config or folder, without importing it."""

import subprocess
import sys

import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM, EsmModel

from esmeray.model.backbones.esm2_network import esm2_config
from esmeray.model.backbones.fingerprint import weights_fingerprint
from esmeray.model.backbones.loading import build_masked_lm, drawn, load_network
from esmeray.model.section import BackboneSection
from tests.model.support import TINY


def transformers_config() -> EsmConfig:
    settings = esm2_config(TINY).to_dict()
    return EsmConfig.from_dict(settings)


def test_the_same_seed_draws_the_weights_that_transformers_draws():
    with drawn(3):
        expected = EsmForMaskedLM(transformers_config())
    state = load_network(TINY, seed=3).state_dict()
    assert list(state) == list(expected.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_config_has_the_same_defaults_as_in_transformers():
    """Fingerprints of features depend on the whole config."""
    for settings in (esm2_config(TINY).to_dict(), {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1}):
        ours = type(esm2_config(TINY))(**settings).to_dict()
        theirs = EsmConfig.from_dict(settings).to_dict()
        origin = ("transformers_version", "architectures", "dtype", "_name_or_path")
        assert ours == {name: value for name, value in theirs.items() if name not in origin}


@pytest.mark.parametrize("kind", [EsmForMaskedLM, EsmModel])
@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_folders_of_transformers_are_read_whole_or_in_shards(kind, shard, tmp_path):
    network = kind(transformers_config())
    network.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "10GB")
    backbone, head = build_masked_lm(BackboneSection(source=str(tmp_path)), 0, 33, 1)
    base = EsmModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert weights_fingerprint(backbone.model) == weights_fingerprint(base)
    assert head.is_drawn == (kind is EsmModel)
    if kind is EsmForMaskedLM:
        assert weights_fingerprint(head) == weights_fingerprint(network.lm_head)


@pytest.mark.slow
def test_an_esm2_embeds_without_transformers():
    lines = (
        "import esmeray, sys; esmeray.open_model('esm2_t6_8M', random_weights=True, device='cpu').embed(['MKTAYIAK'])\n"
        "assert 'transformers' not in sys.modules, 'importing it takes seconds'"
    )
    subprocess.run([sys.executable, "-c", lines], check=True)
