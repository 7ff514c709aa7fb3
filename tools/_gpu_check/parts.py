"""What torch, CUDA, cuDNN, NCCL, NVML, DeepSpeed and Ray see of this machine, and where they do not fit together.

In: this process's libraries and environment. Out: a :class:`~tools._gpu_check.finding.Finding` each. Nothing is
started: no Ray cluster, no process group; CUDA is initialised where it can be, as training would.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools._gpu_check.finding import INSTALL, Finding, guarded, pinned_version, quiet, with_pin

HIDES_GPUS = "CUDA_VISIBLE_DEVICES"
ON_CPU = "nothing to do without a GPU: training runs on the CPU"
GIB = 2**30


@dataclass(frozen=True)
class NvmlFacts:
    """What the driver says.

    Attributes:
        gpus: names of the machine's GPUs, whatever CUDA_VISIBLE_DEVICES says.
        driver: version of the driver.
        cuda: newest CUDA (major, minor) that the driver runs.
        finding: its own line.
    """

    gpus: tuple[str, ...]
    driver: str
    cuda: tuple[int, int]
    finding: Finding


def findings() -> Iterator[Finding]:
    """A line for each part, in the order in which they build on one another."""
    nvml = look_at_nvml()
    yield guarded("torch", find_torch)
    yield guarded("CUDA", lambda: find_cuda(nvml))
    yield guarded("cuDNN", find_cudnn)
    yield guarded("NCCL", find_nccl)
    yield nvml.finding
    yield guarded("DeepSpeed", find_deepspeed)
    yield guarded("DeepSpeed ops", find_ops)
    yield guarded("Ray", find_ray)
    yield guarded("device", lambda: find_device(nvml))


def look_at_nvml() -> NvmlFacts:
    """Ask the driver, which knows of GPUs also where torch can't use them."""
    try:
        import pynvml
    except ImportError:
        return _no_nvml("missing", "nvidia-ml-py is not installed", INSTALL)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            remedy = "the driver was updated under a running kernel module: restart the machine"
            return _no_nvml("mismatch", f"{error}", remedy)
        remedy = "where there is a GPU, install NVIDIA's driver, or start the container with --gpus all"
        return _no_nvml("missing", f"{error}", remedy)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(pynvml.nvmlDeviceGetName(handle) for handle in handles)
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
    except pynvml.NVMLError as error:
        return _no_nvml("mismatch", f"it stopped answering ({error})", "look at nvidia-smi and the kernel's log")
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # a GPU that was lost takes NVML with it
            pynvml.nvmlShutdown()
    newest = (cuda // 1000, cuda % 1000 // 10)
    seen = f"driver {driver}, runs CUDA up to {newest[0]}.{newest[1]}, {_count(gpus)}"
    return NvmlFacts(gpus, driver, newest, Finding("NVML", "ok", seen))


def _no_nvml(verdict: str, seen: str, remedy: str) -> NvmlFacts:
    return NvmlFacts((), "", (0, 0), Finding("NVML", "missing" if verdict == "missing" else "mismatch", seen, remedy))


def find_torch() -> Finding:
    """Its version, and what it was built for."""
    import torch

    if torch.version.cuda:
        build = f"built for CUDA {torch.version.cuda}"
    else:
        build = f"built for ROCm {torch.version.hip}" if torch.version.hip else "built for the CPU"
    return with_pin(Finding("torch", "ok", f"{torch.__version__}, {build}"), "torch")


def find_cuda(nvml: NvmlFacts) -> Finding:
    """Whether torch can use the GPUs that there are."""
    import torch

    if torch.cuda.is_available():
        return _usable_gpus(nvml)
    if torch.version.cuda is None:
        if not nvml.gpus:
            return Finding("CUDA", "missing", "this build of torch has none, and no GPU is seen", ON_CPU)
        remedy = f"install torch's CUDA build: pip install --force-reinstall torch=={pinned_version('torch')}"
        return Finding("CUDA", "mismatch", f"{_count(nvml.gpus)} here, but this build of torch has no CUDA", remedy)
    if not nvml.gpus:
        return Finding("CUDA", "missing", f"torch is built for CUDA {torch.version.cuda}, but no GPU is seen", ON_CPU)
    if _hidden():
        hidden = f"{HIDES_GPUS}={os.environ[HIDES_GPUS]!r} hides {_count(nvml.gpus)}"
        return Finding("CUDA", "missing", hidden, f"unset {HIDES_GPUS} to train on it")
    return _unusable_gpus(nvml)


def _usable_gpus(nvml: NvmlFacts) -> Finding:
    import torch

    described, unfit = [], []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        architecture = f"sm_{gpu.major}{gpu.minor}"
        described.append(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB, {architecture})")
        if not runs_on((gpu.major, gpu.minor), torch.cuda.get_arch_list()):
            unfit.append(architecture)
    hidden = len(nvml.gpus) - len(described)
    seen = ", ".join(described) + (f", and {hidden} more that {HIDES_GPUS} hides" if hidden > 0 and _chosen() else "")
    if unfit:
        built_for = " ".join(torch.cuda.get_arch_list())
        remedy = f"torch is built for {built_for}: install a build for {', '.join(sorted(set(unfit)))}"
        return Finding("CUDA", "mismatch", seen, remedy)
    return Finding("CUDA", "ok", seen)


def _unusable_gpus(nvml: NvmlFacts) -> Finding:
    """torch has CUDA, the driver has GPUs, and yet they don't come together."""
    import torch

    built_for = str(torch.version.cuda)
    newest = ".".join(map(str, nvml.cuda))
    if nvml.cuda[0] < int(built_for.partition(".")[0]):  # within a major version any driver runs any minor one
        seen = f"torch is built for CUDA {built_for}, the driver {nvml.driver} runs {newest} at most"
        return Finding("CUDA", "mismatch", seen, f"update the driver, or install a torch built for CUDA {newest}")
    try:
        torch.cuda.init()
        reason = "torch gives no reason"
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["torch gives no reason"])[0]
    remedy = "look at nvidia-smi and the kernel's log, then restart the machine"
    return Finding("CUDA", "mismatch", f"{_count(nvml.gpus)} here, but torch can't use it ({reason})", remedy)


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a build has code for a GPU.

    Binary code (``sm_``) runs on its own major version from its minor one on, PTX (``compute_``) on whatever is newer
    (CUDA C++ Programming Guide, 'Binary compatibility'); an ``a`` at the end, as in ``sm_90a``, ties it to that one.

    Args:
        capability: major and minor version of the GPU.
        architectures: as :func:`torch.cuda.get_arch_list` gives them; none says nothing.
    """
    parsed = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name) for name in architectures]
    built = [(m[1], (int(m[2]), int(m[3])), m[4]) for m in parsed if m]
    return not built or any(
        version == capability
        or (suffix != "a" and version <= capability and (kind == "compute" or version[0] == capability[0]))
        for kind, version, suffix in built
    )


def find_cudnn() -> Finding:
    """Its version, and whether torch takes it."""
    import torch

    if not torch.backends.cudnn.is_available():
        return Finding("cuDNN", "missing", "not in this build of torch", "torch's CUDA build brings it")
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:  # found, and of another version than torch was compiled against
        reason = str(error).split(". ")[0]
        return Finding("cuDNN", "mismatch", reason, "take other cuDNNs out of LD_LIBRARY_PATH: torch brings its own")
    assert number is not None
    major, rest = divmod(number, 10_000) if number >= 90_000 else divmod(number, 1000)
    return Finding("cuDNN", "ok", f"{major}.{rest // 100}.{rest % 100}")


def find_nccl() -> Finding:
    """What GPUs talk through."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("NCCL", "missing", "this build of torch has no torch.distributed", INSTALL)
    if not dist.is_nccl_available():
        others = "gloo, for the CPU, is there" if dist.is_gloo_available() else "nor is gloo"
        return Finding("NCCL", "missing", f"not in this build of torch; {others}", "torch's CUDA build brings it")
    return Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def find_deepspeed() -> Finding:
    """Its version, and the device that it took."""
    from training.engine.device import choose_device

    device = choose_device(0).type
    with quiet():
        if device == "cpu":  # as training does: without it DeepSpeed warns of having found no accelerator
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator().device_name()
    seen = f"{deepspeed.__version__}, computes on {accelerator}"
    if accelerator != device:
        chosen = os.environ.get("DS_ACCELERATOR")
        remedy = f"unset DS_ACCELERATOR, which says {chosen!r}" if chosen else "see CUDA above"
        return Finding("DeepSpeed", "mismatch", f"{seen}, but torch on {device}", remedy)
    return with_pin(Finding("DeepSpeed", "ok", seen), "deepspeed")


def find_ops() -> Finding:
    """Which of DeepSpeed's own kernels could be compiled here, as ds_report tells. Training needs none of them."""
    import torch

    with quiet():
        from deepspeed.ops.op_builder import builder
        from deepspeed.ops.op_builder.all_ops import ALL_OPS
        from torch.utils.cpp_extension import is_ninja_available

        ops = {name: op for name, op in ALL_OPS.items() if name != "deepspeed_not_implemented"}
        fit = [name for name, op in ops.items() if builder.probe_is_compatible(op)]
        has_ninja = is_ninja_available()
        toolkit: Exception | None = None
        try:
            if torch.version.cuda:
                builder.assert_no_cuda_mismatch()
        except (builder.MissingCUDAException, builder.CUDAMismatchException) as error:
            toolkit = error
    unneeded = "training needs none of them"
    if isinstance(toolkit, builder.CUDAMismatchException):
        installed = ".".join(map(str, builder.installed_cuda_version()))
        seen = f"nvcc is of CUDA {installed}, torch of {torch.version.cuda}"
        remedy = f"install CUDA toolkit {torch.version.cuda} to compile them; {unneeded}"
        return Finding("DeepSpeed ops", "mismatch", seen, remedy)
    if toolkit is not None:
        remedy = f"install CUDA toolkit {torch.version.cuda} to compile them; {unneeded}"
        return Finding("DeepSpeed ops", "missing", "there is no nvcc", remedy)
    if not has_ninja:
        remedy = f"put the environment's bin folder on the PATH to compile them; {unneeded}"
        return Finding("DeepSpeed ops", "missing", "ninja is not on the PATH", remedy)
    unfit = sorted(set(ops) - set(fit))
    seen = f"{len(fit)} of {len(ops)} can be compiled" + (f", not {', '.join(unfit)}" if unfit else "")
    return Finding("DeepSpeed ops", "ok", seen, unneeded if unfit else "")


def find_ray() -> Finding:
    """Its version, and what a cluster started here would offer; none is started."""
    import ray
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    from training.launch.placement import local_resources

    ((cores, gpus),) = local_resources()
    counted = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    counted = counted if visible is None else min(counted, len(visible))
    seen = f"{ray.__version__}, a cluster started here would have {cores} CPU cores and {_gpus(gpus)}"
    if counted != gpus:  # train_ray.py says how many there are; 'ray start' counts by itself
        remedy = f"start clusters with ray start --num-gpus={gpus}"
        return Finding("Ray", "mismatch", f"{seen}, but 'ray start' would count {_gpus(counted)}", remedy)
    return with_pin(Finding("Ray", "ok", seen), "ray")


def find_device(nvml: NvmlFacts) -> Finding:
    """What training would compute on."""
    import torch

    from training.engine.device import choose_device

    device = choose_device(0)
    if device.type == "cuda":
        return Finding("device", "ok", f"{device}, {torch.cuda.get_device_name(device)}")
    if nvml.gpus and not _hidden():
        return Finding("device", "mismatch", f"cpu, though NVML sees {_count(nvml.gpus)}", "see CUDA above")
    return Finding("device", "ok", "cpu: no GPU is seen on this machine")


def _chosen() -> bool:
    return os.environ.get(HIDES_GPUS) is not None


def _hidden() -> bool:
    """Whether the environment hides every GPU."""
    return os.environ.get(HIDES_GPUS, "0").split(",")[0].strip() in ("", "-1", "NoDevFiles")


def _count(names: Sequence[str]) -> str:
    """``2 GPUs (NVIDIA H200)``."""
    kinds = ", ".join(sorted(set(names)))
    return _gpus(len(names)) + (f" ({kinds})" if kinds else "")


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
