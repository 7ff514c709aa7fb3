from types import SimpleNamespace

import pytest
import torch

from esmeray.training.engine.collective import WorkerContext
from esmeray.training.loop import building
from tests.runs import run_folder, tiny_config


@pytest.mark.parametrize(
    ("training", "peak_tflops"),
    [
        ({"precision": "bf16"}, 312.0),
        ({"precision": "fp32", "tf32": True}, 156.0),
        ({"precision": "fp32", "tf32": False}, 19.5),
    ],
)
def test_utilization_is_held_to_the_peak_of_all_devices_in_the_precision_of_products(
    training, peak_tflops, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(building, "Sampler", SimpleNamespace)
    context = WorkerContext(0, 2, 0, torch.device("cuda"))
    for monitoring, expected in ({}, 2 * peak_tflops), ({"peak_tflops": 10.0}, 20.0):
        config = tiny_config(tmp_path, training=training, monitoring=monitoring)
        sampler = building._sampler(config.training, config.monitoring, context, run_folder(config), 1e9)
        assert sampler.peak_tflops == expected
