"""Check which parts of the GPU stack are installed and compatible.

Prints a line each for torch, CUDA, cuDNN, NCCL, NVML, DeepSpeed and Ray: a verdict (ok, missing,
mismatch), what it sees of this machine, and what to do. Starts no cluster. A machine without a GPU is not an error.

--verify trains two steps of a tiny ESM-2 as training would: in bf16 and fp16 on a GPU, in bf16 and fp32 on the CPU if
there is none. The exit code is 4 if a step fails, or if there is a GPU that torch can't use, otherwise 0.

Examples:
  esmeray profile gpu --verify
  esmeray profile gpu --verify && esmeray train --config masked_lm
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Annotated, NamedTuple

import pynvml
from pydantic import Field

from esmeray.common.errors import EsmerayError, ResourceError, first_line
from esmeray.common.text import counted
from esmeray.tools.grammar import command

_INSTALL = "pip install -r requirements/requirements.lock"
_CUDA_BUILD = "torch's CUDA build brings it"
_HIDES_GPUS = "CUDA_VISIBLE_DEVICES"


class Finding(NamedTuple):
    """Verdict on one part: ok, missing, mismatch (installed but incompatible), or failed for training steps."""

    verdict: str
    seen: str
    remedy: str = ""


class Driver(NamedTuple):
    """NVML's facts: all GPUs in words, the driver's version, and the newest CUDA (major, minor) that it supports."""

    gpus: str = ""
    version: str = ""
    cuda: tuple[int, int] = (0, 0)


@command("profile gpu", __doc__)
def main(
    verify: Annotated[
        bool, Field(description="Train two steps in each precision; exit code 4 if a step fails.")
    ] = False,
) -> int:
    driver, nvml = check_driver()  # first: the verdict on torch depends on the GPUs that the driver sees
    # Ordered so that each part depends on the parts before it.
    checks: dict[str, Callable[[], Finding]] = {
        "torch": check_torch,
        "CUDA": lambda: check_cuda(driver),
        "cuDNN": check_cudnn,
        "NCCL": check_nccl,
        "NVML": lambda: nvml,
        "DeepSpeed": check_deepspeed,
        "Ray": check_ray,
    }
    # Print each verdict at once: importing DeepSpeed takes seconds.
    verdicts = {part: _report(part, check) for part, check in checks.items()}
    # A GPU that torch can't use is an error, even if the steps work on the CPU.
    return 0 if not verify or (_steps_work() and verdicts["CUDA"] != "mismatch") else ResourceError.exit_code


def _steps_work() -> bool:
    try:
        from esmeray.model.device import choose_device
        from esmeray.tools.profile._gpu_trial import precisions, single_process_group, train_two_steps
    except ImportError as error:
        raise ResourceError(f"training is not possible: {_first_line(error)}; see the lines above") from error
    device = choose_device()
    works = True
    with single_process_group(device):
        for precision in precisions(device):
            try:
                with _quiet():
                    finding = Finding("ok", f"2 on {device}: {train_two_steps(precision, device)}")
            except Exception as error:  # noqa: BLE001 - whatever breaks is the verdict
                finding = Finding(
                    "failed",
                    f"on {device}: {_first_line(error)}",
                    f"training would fail on {device}, too: see the lines above",
                )
            works &= _print(f"{precision} steps", finding) == "ok"
    return works


def _report(part: str, check: Callable[[], Finding]) -> str:
    """Print a line and return its verdict. A library that can't be imported, or raises, is a finding as well."""
    try:
        finding = check()
    except ModuleNotFoundError as error:
        finding = Finding("missing", f"{error.name} is not installed", _INSTALL)
    except Exception as error:  # noqa: BLE001 - whatever breaks is what this tool reports
        finding = Finding("mismatch", f"the check failed ({_first_line(error)})", f"reinstall: {_INSTALL}")
    return _print(part, finding)


def _print(part: str, finding: Finding) -> str:
    text = " ".join("; ".join(filter(None, finding[1:])).split())
    print(f"{part:<14} {finding.verdict:<8} {text}", flush=True)
    return finding.verdict


def check_driver() -> tuple[Driver, Finding]:
    """Query the driver, which also knows GPUs that torch can't use."""
    try:
        pynvml.nvmlInit()
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        gpus = f"{counted(len(names), 'GPU{s}')} ({', '.join(sorted(set(names)))})" if names else ""
        major, minor = divmod(pynvml.nvmlSystemGetCudaDriverVersion() // 10, 100)  # 13020 is CUDA 13.2
        driver = Driver(gpus, pynvml.nvmlSystemGetDriverVersion(), (major, minor))
        return driver, Finding("ok", f"driver {driver.version}, runs CUDA up to {major}.{minor}, {gpus or 'no GPU'}")
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return Driver(), Finding(
                "missing",
                str(error),
                "if the machine has a GPU, install NVIDIA's driver, or start the container with --gpus all",
            )
        return Driver(), Finding(
            "mismatch", str(error), "check nvidia-smi and the kernel log, then restart the machine"
        )
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # raised if NVML was not initialised
            pynvml.nvmlShutdown()


def check_torch() -> Finding:
    import torch

    return _pinned("torch", f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}")


def check_cuda(driver: Driver) -> Finding:
    import torch

    built_for = torch.version.cuda
    if torch.cuda.is_available():
        return _usable_gpus()
    # CUDA is not available; check the likeliest reason first.
    if not driver.gpus:
        return Finding("missing", "no GPU found", "nothing to fix: without a GPU, training runs on the CPU")
    if built_for is None:
        return Finding(
            "mismatch",
            f"{driver.gpus} found, but this build of torch has no CUDA",
            f"install torch's CUDA build: pip install --force-reinstall torch=={pinned_version('torch')}",
        )
    hidden = os.environ.get(_HIDES_GPUS)
    if hidden is not None and hidden.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        # Not a mismatch: some jobs hide GPUs on purpose.
        return Finding(
            "missing", f"{_HIDES_GPUS}={hidden!r} hides {driver.gpus}", f"unset {_HIDES_GPUS} to train on it"
        )
    if driver.cuda[0] < int(built_for.partition(".")[0]):  # a driver supports all minor versions of its major version
        newest = ".".join(map(str, driver.cuda))
        seen = f"torch is built for CUDA {built_for}, but the driver {driver.version} supports only up to {newest}"
        return Finding("mismatch", seen, f"update the driver, or install a torch built for CUDA {newest}")
    try:
        # init() raises with the reason; is_available() returns False only.
        torch.cuda.init()
        reason = "torch gives no reason"
    except (RuntimeError, AssertionError) as error:
        reason = _first_line(error)
    return Finding(
        "mismatch",
        f"{driver.gpus} found, but torch can't use it ({reason})",
        "check nvidia-smi and the kernel log, then restart the machine",
    )


def _usable_gpus() -> Finding:
    """Describe the GPUs that torch sees. Runs a kernel on each, because torch may not be built for it."""
    import torch

    described = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        described.append(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})")
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()  # item() synchronizes: kernels fail after their launch
        except RuntimeError as error:
            return Finding(
                "mismatch",
                f"{described[-1]} can't run kernels ({_first_line(error)})",
                f"torch is built for {' '.join(torch.cuda.get_arch_list())}: install a build for this GPU",
            )
    return Finding("ok", ", ".join(described))


def check_cudnn() -> Finding:
    """Report cuDNN's version. torch raises if it finds an incompatible one."""
    import torch

    return (
        Finding("ok", str(torch.backends.cudnn.version()))
        if torch.backends.cudnn.is_available()
        else Finding("missing", "not in this build of torch", _CUDA_BUILD)
    )


def check_nccl() -> Finding:
    import torch

    return (
        Finding("ok", ".".join(map(str, torch.cuda.nccl.version())))
        if torch.distributed.is_nccl_available()
        else Finding("missing", "not in this build of torch; not needed on the CPU", _CUDA_BUILD)
    )


def check_deepspeed() -> Finding:
    """Check DeepSpeed's version, and that it uses the same device as torch."""
    from esmeray.model.device import choose_device

    device = choose_device().type
    with _quiet():
        if device == "cpu":  # as training does: otherwise DeepSpeed warns that it found no accelerator
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator().device_name()
    seen = f"{deepspeed.__version__}, computes on {accelerator}"
    elsewhere = Finding("mismatch", f"{seen}, but torch uses {device}", "see CUDA above, and unset DS_ACCELERATOR")
    return _pinned("deepspeed", seen) if accelerator == device else elsewhere


def check_ray() -> Finding:
    """Report the resources that a cluster started here would have, without starting it."""
    import ray

    from esmeray.cluster.placement import local_resources

    ((cores, gpus),) = local_resources()
    return _pinned(
        "ray", f"{ray.__version__}, a cluster started here would have {cores} CPU cores and {counted(gpus, 'GPU{s}')}"
    )


def pinned_version(package: str) -> str:
    # From the package's metadata, because a wheel has no requirements.txt.
    pin = re.search(rf"^{package}(?:\[[^]]*\])?==([^\s;]+)", "\n".join(requires("esmeray") or []), re.MULTILINE)
    assert pin is not None
    return pin[1]


def _pinned(package: str, seen: str) -> Finding:
    """Return ok, or mismatch if Esmeray is tested with another version of the package."""
    pin = pinned_version(package)
    is_pinned = version(package).partition("+")[0] == pin  # 2.13.0+cpu is 2.13.0
    return Finding("ok", seen) if is_pinned else Finding("mismatch", seen, f"Esmeray is tested with {pin}: {_INSTALL}")


def _first_line(error: BaseException) -> str:
    """First line of an error's message, with the type if it is not one of Esmeray's errors."""
    return first_line(error) if isinstance(error, EsmerayError) else f"{type(error).__name__}: {first_line(error)}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of libraries, and of compilers that they start."""
    with Path(os.devnull).open("w") as nowhere, contextlib.ExitStack() as stack:
        # Redirect the descriptors as well, because compilers do not write through sys.stdout.
        for descriptor in (1, 2):
            copy = os.dup(descriptor)
            stack.callback(os.close, copy)
            stack.callback(os.dup2, copy, descriptor)
            os.dup2(nowhere.fileno(), descriptor)
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield
