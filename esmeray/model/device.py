"""Devices and precisions: which there are, how they are named, and what running out of one's memory looks like."""

import os
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from esmeray.common.errors import ConfigError, ForkedError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's type of each ``precision``."""

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2",
)
"""Errors of what allocates beside torch's caching allocator: CUDA itself, cuBLAS, cuDNN, NCCL."""


def choose_device() -> torch.device:
    """The first GPU that this process sees, which Ray makes its own; the CPU without one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_device(device: torch.device | str) -> None:
    """Raise ConfigError for a device that torch does not know or see."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device}: torch knows none of this name; use cpu, cuda or cuda:1") from error
    # Any other kind has no devices here, like a cluster without GPUs.
    if wanted.type != "cpu" and (wanted.type != "cuda" or (wanted.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device {device}: torch sees {torch.cuda.device_count()} CUDA devices here; use another, or cpu"
        )


_computing_process = cache(os.getpid)
"""The process of the first call; after a fork still the parent's."""


def refuse_forked(name: str) -> None:
    """Raise ForkedError if a model was opened before this process was forked. Called first when one is opened.

    The threads of torch, OpenMP and CUDA do not survive a fork: the first product would wait for them without end.
    """
    if _computing_process() != os.getpid():
        raise ForkedError(
            f"{name}: a model was opened before this process was forked, which has no threads of torch: fork before "
            "any model is opened, or spawn the process"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Test for out of memory: on a GPU, on the CPU, or of a :class:`MemoryMeter`'s limit."""
    # By text as well: what allocates beside the caching allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def seed_draws(device: torch.device, seed: int) -> None:
    """Seed what is drawn on the CPU and on ``device``, the process's current one."""
    # torch.manual_seed would wake every device that there is, and format the stack for those that it does not find.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class HostCopy:
    """Tensors on their way to the host: reading them waits for these copies, not for what the device does after."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        # An event behind the copies: to synchronise the device would wait for the next batch, too.
        self._copied = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors.values()) else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> dict[str, Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return dict(self._tensors)
