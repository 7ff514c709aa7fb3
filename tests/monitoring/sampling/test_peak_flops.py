"""Peaks are those of the GPU that the driver names, or none."""

from __future__ import annotations

import pytest

from monitoring.sampling.peak_flops import flops_utilization, matrix_precision, peak_tflops


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 3090", 71.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
    ],
)
def test_known_gpus_have_their_peak(name, bf16):
    assert peak_tflops(name, "bf16") == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "Quadro P400",
        "",
    ],
)
def test_like_names_of_other_gpus_have_none(name):
    assert peak_tflops(name, "bf16") is None


@pytest.mark.parametrize(
    ("name", "fp16"), [("Tesla T4", 65.0), ("Tesla V100-SXM2-32GB", 125.0), ("Tesla V100-PCIE-16GB", 112.0)]
)
def test_older_gpus_have_no_bf16_and_no_tf32(name, fp16):
    assert peak_tflops(name, "fp16") == fp16
    assert peak_tflops(name, "bf16") is None
    assert peak_tflops(name, "tf32") == peak_tflops(name, "fp32")


@pytest.mark.parametrize(
    ("amp_dtype", "tf32", "precision"),
    [("bf16", True, "bf16"), ("fp16", False, "fp16"), ("none", True, "tf32"), ("none", False, "fp32")],
)
def test_precision_of_matrix_products_follows_the_settings(amp_dtype, tf32, precision):
    assert matrix_precision(amp_dtype, tf32) == precision


def test_utilization_is_a_share_of_all_devices():
    assert flops_utilization(1e6, 3.12e8, 312.0, 2) == pytest.approx(0.5)
