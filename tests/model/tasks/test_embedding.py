"""Embeddings are those of Hugging Face's model, one protein at a time, in any packing."""

import copy

import pytest
import torch
from torch import nn

from common.errors import DataError
from dataset.tokens.esm import pack_sequences
from model.backbones.esm2 import EsmBackbone
from model.backbones.loading import load_network
from model.tasks.embedding import PrepackedLinear, embed, optimize_for_inference
from tests.model.support import random_sequences
from train_config.schema import BackboneSection

SEQUENCES = random_sequences([40, 3, 130, 1, 63, 250])


@pytest.fixture(scope="module")
def network():
    return load_network(BackboneSection(source="esm2_t6_8M", layers=2), seed=3).eval()


@pytest.fixture(scope="module")
def expected(network):
    with torch.inference_mode():
        states = [network.esm(pack_sequences([s]).tokens[None]).last_hidden_state[0] for s in SEQUENCES]
    return torch.stack([state[1:-1].mean(0) for state in states])


@pytest.fixture
def backbone(network):
    return EsmBackbone(copy.deepcopy(network.esm)).eval()


@pytest.mark.parametrize("max_tokens", [1, 150, 10_000])
def test_fp32_agrees_with_transformers_in_any_packing(backbone, expected, max_tokens):
    ours = embed(backbone, SEQUENCES, max_tokens=max_tokens)
    assert ((ours - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-5


def test_bf16_with_prepacked_layers_points_the_same_way_for_each_protein(backbone, expected):
    optimized = optimize_for_inference(backbone)
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not so on a processor without AVX-512
    assert any(isinstance(module, PrepackedLinear) for module in optimized.modules()) == packs
    assert nn.functional.cosine_similarity(embed(optimized, SEQUENCES), expected).min() >= 0.999


def test_no_sequences_give_no_rows_and_what_is_no_residue_is_refused(backbone):
    assert embed(backbone, []).shape == (0, backbone.hidden_size)
    with pytest.raises(DataError, match="sequence 1 "):
        embed(backbone, ["ACD", "AC1"])
