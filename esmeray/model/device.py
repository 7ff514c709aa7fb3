"""Devices and precisions: choice and check of a device, dtypes by name, and detection of out-of-memory errors."""

import os
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from esmeray.common.errors import ConfigError, ForkedError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch dtype of each ``precision``."""

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2",
)
"""Texts of errors from allocators other than torch's caching allocator: CPU, CUDA itself, cuBLAS, cuDNN, NCCL."""


def choose_device() -> torch.device:
    """Return the first GPU that this process sees, which Ray assigns to it, or the CPU without a GPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_device(device: torch.device | str) -> None:
    """Raise ConfigError for a device that torch does not know, or that does not exist here."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device}: unknown device; use cpu, cuda or cuda:N") from error
    # Only CPU and CUDA devices are supported.
    if wanted.type != "cpu" and (wanted.type != "cuda" or (wanted.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device {device}: torch finds {torch.cuda.device_count()} CUDA devices on this machine; use "
            "another, or cpu"
        )


_computing_process = cache(os.getpid)
"""Process id of the first call; after a fork it is still the parent's."""


def refuse_forked(name: str) -> None:
    """Raise ForkedError if a model was opened before this process was forked. Call it before opening a model.

    The threads of torch, OpenMP and CUDA do not survive a fork: the first product would wait for them forever.
    """
    if _computing_process() != os.getpid():
        raise ForkedError(
            f"{name}: a model was opened before this process was forked, and torch's threads do not survive a "
            "fork: fork before opening a model, or use the spawn start method"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Test whether an error means out of memory: on a GPU, on the CPU, or at the limit of a :class:`MemoryMeter`."""
    # Check the text as well, because other allocators than the caching one raise a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def seed_draws(device: torch.device, seed: int) -> None:
    """Seed the random generators of the CPU and of ``device``, which must be the current device."""
    # torch.manual_seed would initialize every device, and format the stack for devices that it does not find.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class HostCopy:
    """Asynchronous copy of tensors to the host. Reading waits for the copies only, not for later work on the device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        # An event after the copies, because synchronizing the device would also wait for the next batch.
        self._copied = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors.values()) else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> dict[str, Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return dict(self._tensors)
