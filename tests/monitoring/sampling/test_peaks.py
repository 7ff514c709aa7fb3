"""Peaks are those of the GPU that the driver names, or none."""

from esmeray.monitoring.sampling.peaks import known_gpus, known_peaks, peak_tflops

BF16 = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "Tesla T4": None,
}


def test_known_gpus_have_their_peak_and_like_names_none():
    assert {name: peak_tflops(name, "bf16") for name in BF16} == BF16
    assert peak_tflops("Tesla V100-SXM2-32GB", "fp16") == 125.0
    assert peak_tflops("Tesla V100-SXM2-32GB", "tf32") == peak_tflops("Tesla V100-SXM2-32GB", "fp32")
    assert {"H100", "A100-40GB", "V100-SXM2-32GB"} < {*known_gpus()}
    assert all(known_peaks(name) for name in known_gpus())
