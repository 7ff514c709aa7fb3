"""The device of a worker, and torch's switches for it."""

from __future__ import annotations

import os

import torch

from train_config.schema import TrainingSection

CUBLAS_WORKSPACE = ":4096:8"
"""Workspaces with which cuBLAS gives the same result each time (NVIDIA's cuBLAS documentation, 'Reproducibility')."""


def choose_device(local_rank: int) -> torch.device:
    """The GPU of this rank on its node, or the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def apply_device_settings(training: TrainingSection) -> None:
    """Set torch's switches for this process: TF32, cuDNN's choice of kernels, determinism.

    To be called before anything is computed: cuBLAS reads its part of determinism once, when it is first used.
    """
    if training.deterministic:  # or torch refuses every matrix product on CUDA
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(training.deterministic)
    torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = training.tf32
    torch.backends.cudnn.benchmark = training.cudnn_benchmark
