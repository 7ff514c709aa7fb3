"""The device of a worker, and torch's switches for it."""

import os

import torch

from common.compiled_code import cache_folder
from common.errors import ConfigError, ResourceError
from dataset.packed_batch import PackedBatch
from model.backbones.base import PackedBackbone
from model.backbones.fp8 import use_fp8
from train_config.schema import TrainingSection

_FP8_CAPABILITY = (9, 0)
CUBLAS_WORKSPACE = ":4096:8"
"""Workspaces with which cuBLAS gives the same result each time (NVIDIA's cuBLAS documentation, 'Reproducibility')."""


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


def prepare_layers(backbone: PackedBackbone, training: TrainingSection, device: torch.device, stage: int = 0) -> None:
    """FP8 products and compiled layers where asked for; layers are compiled by default on CUDA, under ZeRO-0 to 2.

    Compiled code is kept in the user's cache folder. Raises ResourceError where the device has no FP8, ConfigError
    where torchao is not installed or settings don't go together.
    """
    if training.compile and stage == 3:
        raise ConfigError("training.compile: ZeRO-3 gathers weights in hooks that torch can't compile; set it to false")
    if training.fp8:
        if training.precision != "bf16":
            raise ConfigError("training.fp8 needs training.precision bf16")
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
            raise ResourceError("training.fp8 needs an NVIDIA GPU with FP8, Hopper or later: set it to false")
        use_fp8(backbone)
    if training.compile or (training.compile is None and device.type == "cuda" and stage < 3):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
        backbone.compile_layers()


class BatchCopies:
    """Copies of batches to a device, on CUDA on a stream of their own, beside what is still done for those before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, batch: PackedBatch) -> PackedBatch:
        """The batch on the device; where its memory is pinned, the host does not wait."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device, non_blocking=True)
        reader = torch.cuda.current_stream(self._device)
        reader.wait_stream(self._stream)
        copied.keep_for(reader)
        return copied
