"""``esmeray profile gpu`` prints a line per component with advice, and trains two real steps."""

import sys

import pynvml
import pytest
import ray
import torch

from esmeray.tools.profile import _gpu_trial as trial
from esmeray.tools.profile import gpu as gpu_check
from esmeray.tools.profile.gpu import pinned_version
from esmeray.training.engine.engine import StepResult, TrainingEngine

PARTS = ["torch", "CUDA", "cuDNN", "NCCL", "NVML", "DeepSpeed", "Ray"]


def raising(number: int):
    def call(*_):
        raise pynvml.NVMLError(number)

    return call


@pytest.fixture
def no_gpu(monkeypatch):
    """Simulate a machine without a GPU and without a driver."""
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def driver(no_gpu, monkeypatch):
    """Simulate a driver for CUDA 12.4 with two GPUs that torch can't use."""
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlSystemGetDriverVersion": "550.54",
        "nvmlSystemGetCudaDriverVersion": 12040,
    }
    for name, value in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, value=value: value)


@pytest.fixture
def few_parts(monkeypatch):
    monkeypatch.setattr(trial, "precisions", lambda device: ["fp32"])


def lines_of(out: str) -> dict[str, tuple[str, str]]:
    """Verdict and remaining text by component."""
    return {line[:15].strip(): (line[15:24].strip(), line[24:]) for line in out.splitlines()}


@pytest.mark.usefixtures("process_group")
def test_every_part_has_a_line_and_two_steps_in_each_precision_work(command, no_gpu, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("a cluster was started"))
    outcome = command("profile", "gpu", "--verify")
    assert outcome.code == 0, outcome.out
    lines = lines_of(outcome.out)
    assert list(lines) == [*PARTS, "bf16 steps", "fp32 steps"]
    assert {lines[part][0] for part in PARTS} <= {"ok", "missing", "mismatch"}
    assert torch.__version__ in lines["torch"][1]
    assert lines["NVML"][0] == "missing"
    assert "NVML Shared Library Not Found; if the machine has a GPU, install NVIDIA's driver" in lines["NVML"][1]
    assert ray.__version__ in lines["Ray"][1]
    assert "computes on cpu" in lines["DeepSpeed"][1]
    for part in ("bf16 steps", "fp32 steps"):
        assert lines[part][0] == "ok"
        assert lines[part][1].startswith("2 on cpu: loss 3.")


def broken_backward(self, loss_sum, global_targets):
    raise RuntimeError("CUDA error: an illegal memory access\nmore lines")


@pytest.mark.usefixtures("process_group", "no_gpu")
@pytest.mark.parametrize(
    ("method", "replacement", "problem"),
    [
        ("step", lambda *_: StepResult(torch.tensor(1.0), False), "the update did not lower the loss"),
        ("backward", broken_backward, "RuntimeError: CUDA error: an illegal memory access;"),
    ],
)
def test_whatever_breaks_in_a_step_is_a_line_and_an_exit_code(
    command, few_parts, monkeypatch, method, replacement, problem
):
    monkeypatch.setattr(TrainingEngine, method, replacement)
    outcome = command("profile", "gpu", "--verify")
    verdict, seen = lines_of(outcome.out)["fp32 steps"]
    assert (outcome.code, verdict) == (4, "failed") and seen.startswith("on cpu: ") and problem in seen


@pytest.mark.usefixtures("driver", "few_parts")
@pytest.mark.parametrize(
    ("build", "seen", "remedy"),
    [
        (None, "2 GPUs (NVIDIA H200) found, but this build of torch has no CUDA", "install torch's CUDA build"),
        ("13.0", "torch is built for CUDA 13.0, but the driver 550.54 supports only up to 12.4", "update the driver"),
        ("12.1", "torch can't use it (RuntimeError: Unexpected error from cudaGetDeviceCount())", "restart"),
    ],
)
def test_gpu_that_torch_cannot_use_is_a_mismatch_with_the_reason(command, monkeypatch, build, seen, remedy):
    def give_up():
        raise RuntimeError("Unexpected error from cudaGetDeviceCount()\nmore")

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", give_up)
    lines = lines_of(command.done("profile gpu").out)
    assert lines["NVML"] == ("ok", "driver 550.54, runs CUDA up to 12.4, 2 GPUs (NVIDIA H200)")
    verdict, text = lines["CUDA"]
    assert verdict == "mismatch" and seen in text and remedy in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # hidden GPUs do not count, unless torch can't use them anyway
    verdict, text = lines_of(command.done("profile gpu").out)["CUDA"]
    hidden = "CUDA_VISIBLE_DEVICES='-1' hides 2 GPUs (NVIDIA H200)"
    assert build is None or (verdict == "missing" and text.startswith(hidden))


@pytest.mark.usefixtures("driver", "few_parts")
def test_a_driver_that_does_not_answer_is_a_mismatch(command, monkeypatch):
    for call, number in (
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST),
        ("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    ):
        monkeypatch.setattr(pynvml, call, raising(number))
        verdict, text = lines_of(command.done("profile gpu").out)["NVML"]
        assert verdict == "mismatch" and "restart the machine" in text
    monkeypatch.setattr(gpu_check, "version", lambda package: "2.0.0+cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(gpu_check, "check_ray", lambda: __import__("ray.absent"))
    monkeypatch.setattr(gpu_check, "check_nccl", lambda: torch.ops.load_library("absent.so"))
    lines = lines_of(command.done("profile gpu").out)
    assert lines["torch"][0] == "mismatch" and f"tested with {pinned_version('torch')}" in lines["torch"][1]
    assert lines["DeepSpeed"][0] == lines["Ray"][0] == "missing" and "is not installed" in lines["DeepSpeed"][1]
    assert lines["NCCL"][0] == "mismatch" and "the check failed" in lines["NCCL"][1]
    monkeypatch.setattr(gpu_check, "version", lambda package: f"{pinned_version('torch')}+cpu")
    assert lines_of(command.done("profile gpu").out)["torch"][0] == "ok"
