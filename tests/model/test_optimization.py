"""An optimized backbone has nearly the same outputs: bf16 for inference, FP8 matmuls for training.

torchao emulates FP8 on the CPU; without torchao these tests are skipped (make bench installs it).
"""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.heads.pooling import mean_over_residues
from esmeray.model.optimization import PrepackedLinear, optimize_for_inference, use_fp8
from esmeray.model.section import BackboneSection
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.training.engine.engine import prepare_layers
from esmeray.training.section import TrainingSection
from tests.model.support import build_model, masked_batch, random_sequences, tiny_section


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


@settings(max_examples=8, deadline=None)
@given(others=st.lists(st.integers(1, 500), max_size=6), threads=st.sampled_from([1, 2]))
def test_an_fp32_vector_has_the_same_bits_in_every_batch(others, threads):
    sequences = random_sequences([30, *others])
    backbone = build_backbone(BackboneSection(source="esm2_t6_8M", layers=1), seed=3)
    optimize_for_inference(backbone, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            alone, together = (backbone(pack_sequences(rows))[:32] for rows in (sequences[:1], sequences))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


def masked_lm() -> MaskedLM:
    return build_model(tiny_section("masked_lm"), seed=0).bfloat16()


def gradients(model: MaskedLM) -> dict[str, torch.Tensor]:
    sequences = random_sequences([30, 20, 10])
    model(masked_batch(sequences, [0.3] * 3)).loss_sum.backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_fp8_gradients_equal_bf16_to_rounding():
    expected, model = gradients(masked_lm()), masked_lm()
    use_fp8(model.backbone, emulate=True)
    assert {type(m).__name__ for m in model.backbone.layers.modules() if isinstance(m, nn.Linear)} == {"Float8Linear"}
    torch._dynamo.reset()
    counters.clear()
    model.backbone.compile_layers(backend="eager")
    measured = gradients(model)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()
    assert measured.keys() == expected.keys()
    flat, reference = (torch.cat([value.flatten() for value in values.values()]) for values in (measured, expected))
    cosine = float(nn.functional.cosine_similarity(flat, reference, dim=0))
    assert 0.99 < cosine < 0.99999, "e4m3 has four significant bits, bf16 eight"


@pytest.mark.parametrize(
    ("settings", "stage", "error", "reason"),
    [
        ({"fp8": True}, 2, ResourceError, "training.fp8 needs an NVIDIA GPU"),
        ({"fp8": True, "precision": "fp32"}, 2, ConfigError, "needs training.precision bf16"),
        ({"compile": True}, 3, ConfigError, "ZeRO-3 gathers weights"),
    ],
)
def test_impossible_precisions_and_compilation_are_refused(settings, stage, error, reason):
    with pytest.raises(error, match=reason):
        prepare_layers(masked_lm().backbone, TrainingSection(**settings), torch.device("cpu"), stage)
