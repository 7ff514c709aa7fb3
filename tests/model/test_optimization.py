"""A backbone that was made fast gives nearly the same."""

import torch
from torch import nn

from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.heads.pooling import mean_over_residues
from esmeray.model.optimization import PrepackedLinear, optimize_for_inference
from esmeray.model.section import BackboneSection
from tests.model.support import random_sequences


def test_bf16_with_prepacked_layers_points_the_same_way_for_each_protein():
    batch = pack_sequences(random_sequences([40, 3, 130, 1, 63, 250]))
    backbone = build_backbone(BackboneSection(source="esm2_t6_8M", layers=2), seed=3).eval()
    with torch.inference_mode():
        expected = mean_over_residues(backbone(batch), batch)
        optimized = optimize_for_inference(backbone)
        packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not so on a processor without AVX-512
        assert any(isinstance(module, PrepackedLinear) for module in optimized.modules()) == packs
        means = mean_over_residues(optimized(batch), batch)
    assert nn.functional.cosine_similarity(means, expected).min() >= 0.999
