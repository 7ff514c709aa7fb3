"""The device of a worker: which one it is, how torch is set up for it, and whether everything lies on it.

The one place that decides these. In: the rank on this machine, the settings of the optimisation. Out: a
:class:`torch.device`, torch's global switches, or a refusal that names the tensor that was left elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor, nn

from common.errors import EsmerayError
from dataset.packed_batch import PackedBatch
from train_config.schema import TrainingSection

CUBLAS_WORKSPACE = ":4096:8"
"""Workspaces with which cuBLAS gives the same result each time (NVIDIA's cuBLAS documentation, 'Reproducibility')."""


class PlacementError(EsmerayError):
    """A tensor of the model or of a batch is not on the device that it is computed on: a fault of who moved it."""


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


def check_placement(model: nn.Module, batch: PackedBatch, device: torch.device) -> None:
    """Make sure that all of a model and of a batch is on ``device``. Reads no tensor, so nothing waits for a GPU.

    Empty tensors may lie anywhere: ZeRO-3 leaves one in place of a parameter that is spread over the workers.

    Raises:
        PlacementError: something is not; names the first such parameter, buffer or field of the batch.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for kind, name, tensor in _tensors(model, batch):
        if tensor.numel() and not _is_on(tensor, device):
            moved = "PackedBatch.to" if kind == "batch field" else "model.to"
            raise PlacementError(
                f"{kind} {name} is on {tensor.device}, but the device of this worker is {device}: "
                f"move it there by {moved} before it is used"
            )


def _tensors(model: nn.Module, batch: PackedBatch) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
    for field in fields(batch):
        if isinstance(value := getattr(batch, field.name), Tensor):
            yield "batch field", field.name, value


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Test for the same device; "cpu" has no index or, where one was given, any."""
    return tensor.device.type == device.type and (device.type == "cpu" or tensor.device.index == device.index)
