"""Import DeepSpeed for a device, with a folder for its compiled operators that a killed process can't leave locked.

PyTorch marks a folder in which it compiles with a file, and waits forever if the owner of the file was killed. Here
each Python environment and processor has its own folder, guarded by a lock that the kernel releases when a process is
killed. A mark that is found under the lock has no living owner. The operators are built with the tools of the Python
environment, as if it were activated: ninja 1.13 considers a build by the system's ninja 1.11 out of date, and vice
versa.
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
_LOG = logging.getLogger(__name__)


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for this device, without output, on the existing process group."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed requires its launcher's variable even if the process group exists already.
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed

    _import_muon_uncompiled()
    printed = io.StringIO()  # output of operator builds, which would reach the terminal
    with compiling_alone(), redirect_stdout(printed):
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    for line in printed.getvalue().splitlines():
        _LOG.info(line)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Keep other processes on this machine from compiling DeepSpeed's operators while the block runs.

    Waits for a process that is already compiling. A folder that the user chose by TORCH_EXTENSIONS_DIR is left as it
    is.
    """
    if os.environ.get(_VARIABLE):
        yield
        return
    # Compiled code depends on all of these, so each combination has its own folder.
    environment = [sys.prefix, sys.version, version("torch"), version("deepspeed"), processor()]
    folder = cache_folder("operators") / hashlib.sha256("\0".join(environment).encode()).hexdigest()[:16]
    with exclusive(folder):
        # PyTorch's mark file (torch.utils.cpp_extension, torch 2.13). This process holds the lock, so the process that
        # created the mark is no longer alive.
        for mark in folder.glob("*/lock"):
            _LOG.warning("%s: removed; it was left by a killed compilation", mark)
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
    """Load DeepSpeed 0.19.8's Muon optimizer without compiling its kernels.

    DeepSpeed imports it when it creates an engine, to compare the optimizer's type. With it comes torch's compiler,
    which takes over a second of a worker's start.
    """
    from deepspeed.runtime import compiler

    compile_kernels = compiler.compile
    compiler.compile = lambda: lambda kernel: kernel
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_kernels
