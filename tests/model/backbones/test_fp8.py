"""FP8 products, as torchao emulates them on the CPU; skipped where it is not installed (make bench installs it)."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.model.optimization import use_fp8
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.training.engine.engine import prepare_layers
from esmeray.training.section import TrainingSection
from tests.model.support import build_model, masked_batch, random_sequences, tiny_section

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def masked_lm() -> MaskedLM:
    return build_model(tiny_section("masked_lm"), seed=0).bfloat16()


def gradients(model: MaskedLM) -> dict[str, torch.Tensor]:
    sequences = random_sequences([30, 20, 10])
    model(masked_batch(sequences, [0.3] * 3)).loss_sum.backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@needs_torchao
def test_gradients_are_those_of_bf16_to_the_rounding_of_fp8_names_stay_and_layers_are_one_graph():
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
def test_what_can_not_be_is_refused(settings, stage, error, reason):
    with pytest.raises(error, match=reason):
        prepare_layers(masked_lm().backbone, TrainingSection(**settings), torch.device("cpu"), stage)
