"""Importing DeepSpeed for a device, and a folder for its compiled operators that no killed process leaves locked.

PyTorch marks a folder in which it compiles with a file, and waits for ever for a file whose owner was killed. Here each
Python environment and processor has a folder of its own, guarded by a lock that the kernel takes back from a killed
process: a mark that is found under the lock has no owner any more. The tools of the Python environment compile, as if
it were activated: a build of ninja 1.13 is out of date to the system's ninja 1.11, and the other way round.
"""

import hashlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import torch

from esmeray.common.compiled_code import processor
from esmeray.common.own_folders import cache_folder
from esmeray.common.publishing import exclusive

_VARIABLE = "TORCH_EXTENSIONS_DIR"
_MARK = "lock"
"""Name of PyTorch's file (torch.utils.cpp_extension, torch 2.13)."""

_LOG = logging.getLogger(__name__)


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for this device, quietly, on the process group that exists."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed asks for its launcher's variable even where the process group exists already.
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed

    _import_muon_uncompiled()
    printed = io.StringIO()  # of operators that are built, also in the process that has the terminal
    with compiling_alone(), redirect_stdout(printed):
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    for line in printed.getvalue().splitlines():
        _LOG.info(line)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Let no other process compile DeepSpeed's operators on this machine while the block lasts; wait for one that does.

    A folder that the user chose by TORCH_EXTENSIONS_DIR is left as it is.
    """
    if os.environ.get(_VARIABLE):
        yield
        return
    # What compiled code depends on: another of them has a folder of its own.
    environment = [sys.prefix, sys.version, version("torch"), version("deepspeed"), processor()]
    folder = cache_folder("operators") / hashlib.sha256("\0".join(environment).encode()).hexdigest()[:16]
    with exclusive(folder):
        # Whoever made it has no lock any more, so that it does not live.
        for mark in folder.glob(f"*/{_MARK}"):
            _LOG.warning("%s: left by a compilation that was killed; removed", mark)
            mark.unlink()
        path = os.environ.get("PATH", os.defpath)
        os.environ[_VARIABLE] = str(folder)
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), path])
        try:
            yield
        finally:
            del os.environ[_VARIABLE]
            os.environ["PATH"] = path


def _import_muon_uncompiled() -> None:
    """Load the optimizer that DeepSpeed 0.19.8 holds every other against, without compiling its kernels.

    DeepSpeed would import it when the engine is made, and torch's compiler with it: over a second of a worker's start.
    """
    from deepspeed.runtime import compiler

    compile_kernels = compiler.compile
    compiler.compile = lambda: lambda kernel: kernel
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_kernels
