"""``python -m tools gpu_check``: a line a part with what to do, and two real steps that say whether training works."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pynvml
import pytest
import ray
import torch

from tools import gpu_check
from tools._gpu_check import finding, parts, trial
from tools._gpu_check.finding import Finding, guarded, note_if_slow, pinned_version, quiet, with_pin
from tools._gpu_check.parts import NvmlFacts, find_cuda, find_device, look_at_nvml, runs_on
from tools._gpu_check.trial import Trial
from training.engine.engine import StepResult, TrainingEngine

PARTS = ["torch", "CUDA", "cuDNN", "NCCL", "NVML", "DeepSpeed", "DeepSpeed ops", "Ray", "device"]
CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU and without a driver."""

    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def driver(monkeypatch):
    """A driver of CUDA 12.4 with two GPUs."""
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def lines_of(out: str) -> dict[str, tuple[str, str]]:
    """Part -> (verdict, the rest)."""
    width = len(Finding("", "ok", "").line()) - len("mismatch ")
    split = [(line[:width].strip(), line[width:].split(maxsplit=1)) for line in out.splitlines()]
    return {part: (verdict, *rest) for part, (verdict, *rest) in split}


def test_every_part_has_an_aligned_line_and_no_cluster_is_started(command, no_gpu, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("a cluster was started"))
    outcome = command("gpu_check")
    assert outcome.code == 0
    lines = lines_of(outcome.out)
    assert list(lines) == PARTS
    assert all(line.endswith(" ...") for line in outcome.err.splitlines())
    assert {verdict for verdict, *_ in lines.values()} <= {"ok", "missing", "mismatch"}
    assert torch.__version__ in lines["torch"][1]
    assert lines["NVML"][0] == "missing"
    assert "NVML Shared Library Not Found; where there is a GPU, install NVIDIA's driver" in lines["NVML"][1]
    assert ray.__version__ in lines["Ray"][1]
    assert "computes on cpu" in lines["DeepSpeed"][1]
    assert lines["device"] == ("ok", "cpu: no GPU is seen on this machine")


def test_libraries_and_the_compilers_that_they_start_print_nothing(capfd):
    with quiet():
        print("library")
        print("library", file=sys.stderr)
        os.write(1, b"library\n")
        subprocess.run([sys.executable, "-S", "-c", "import sys; print('c', file=sys.stderr); print('c')"], check=True)
    print("line")
    assert capfd.readouterr() == ("line\n", "")


@pytest.mark.usefixtures("process_group")
class TestVerify:
    def test_cpu_path_takes_two_steps_in_bf16_and_fp32(self, command, no_gpu):
        outcome = command("gpu_check", "--verify")
        assert outcome.code == 0, outcome.out
        lines = lines_of(outcome.out)
        assert list(lines) == [*PARTS, "bf16 steps", "fp32 steps"]
        for part in ("bf16 steps", "fp32 steps"):
            verdict, seen = lines[part]
            assert verdict == "ok"
            assert seen.startswith("2 on cpu: loss 3.")

    def test_update_that_changes_nothing_fails(self, command, no_gpu, monkeypatch):
        monkeypatch.setattr(gpu_check, "findings", lambda: [Finding("device", "ok", "cpu")])
        monkeypatch.setattr(TrainingEngine, "step", lambda self, learning_rate: StepResult(1.0, False, False))
        outcome = command("gpu_check", "--verify")
        assert outcome.code == 4
        verdict, seen = lines_of(outcome.out)["fp32 steps"]
        assert verdict == "failed"
        assert seen.startswith("on cpu: the update changed no weight; training would not work on cpu either")

    def test_whatever_breaks_in_a_step_is_a_line_and_an_exit_code(self, command, no_gpu, monkeypatch):
        def broken(self, loss_sum, global_targets):
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

        monkeypatch.setattr(TrainingEngine, "backward", broken)
        monkeypatch.setattr(gpu_check, "findings", lambda: [Finding("device", "ok", "cpu")])
        outcome = command("gpu_check", "--verify")
        assert outcome.code == 4
        assert outcome.out.count("failed   on cpu: RuntimeError: CUDA error: an illegal memory access;") == 2

    def test_gpu_that_torch_cannot_use_fails_though_the_cpu_works(self, command, driver):
        outcome = command("gpu_check", "--verify")
        lines = lines_of(outcome.out)
        assert outcome.code == 4
        assert lines["device"] == ("mismatch", "cpu, though NVML sees 2 GPUs (NVIDIA H200); see CUDA above")
        assert lines["bf16 steps"][0] == "ok"


def test_nothing_can_be_verified_without_torch_which_is_one_line(command, monkeypatch):
    monkeypatch.setattr(gpu_check, "findings", lambda: [Finding("device", "missing", "torch is not installed")])
    monkeypatch.setitem(sys.modules, "tools._gpu_check.trial", None)
    outcome = command("gpu_check", "--verify")
    assert outcome.code == 4
    assert outcome.err.startswith("error: no step can be trained: ")


def test_half_precisions_are_tried_on_a_gpu_and_fp32_on_the_cpu():
    assert trial.precisions(torch.device("cuda", 0)) == ("bf16", "fp16")
    assert trial.precisions(CPU) == ("bf16", "none")


@pytest.mark.parametrize(
    ("trial", "problem"),
    [
        (Trial(3.5, [3.49, 3.4], [1.0, 1.0], 2, True), ""),
        (Trial(3.5, [3.7, 3.4], [1.0, 1.0], 0, True), "the loss is 3.7000, in fp32 on the CPU 3.5000"),
        (Trial(3.5, [3.5, 3.5], [1.0, 1.0], 0, True), "the update did not lower the loss"),
        (Trial(3.5, [3.5, 3.5], [1.0, 1.0], 0, False), "the update changed no weight"),
        (Trial(3.5, [3.5, float("nan")], [1.0, 1.0], 0, True), "are not all finite"),
        (Trial(3.5, [], [], 20, False), "20 steps in a row had gradients that are not finite"),
    ],
)
def test_steps_that_are_no_training_are_told_apart(trial, problem):
    assert problem in trial.problem()
    assert bool(problem) == bool(trial.problem())


def test_driver_says_what_it_has(driver):
    facts = look_at_nvml()
    assert (facts.gpus, facts.cuda) == (("NVIDIA H200", "NVIDIA H200"), (12, 4))
    assert facts.finding.seen == "driver 550.54, runs CUDA up to 12.4, 2 GPUs (NVIDIA H200)"


def test_driver_that_was_updated_under_the_kernel_is_a_mismatch(driver, monkeypatch):
    def outdated():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", outdated)
    line = look_at_nvml().finding
    assert line.verdict == "mismatch"
    assert "restart the machine" in line.remedy


def test_driver_that_stops_answering_is_a_mismatch(driver, monkeypatch):
    def lost(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lost)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lost)
    assert look_at_nvml().finding.line().startswith("NVML           mismatch it stopped answering (GPU is lost)")


def test_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert look_at_nvml().finding == Finding("NVML", "missing", "nvidia-ml-py is not installed", finding.INSTALL)


def test_gpu_under_a_cpu_build_of_torch_is_a_mismatch(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    line = find_cuda(look_at_nvml())
    assert line.verdict == "mismatch"
    assert line.seen == "2 GPUs (NVIDIA H200) here, but this build of torch has no CUDA"
    assert line.remedy.endswith(f"--force-reinstall torch=={pinned_version('torch')}")


def test_driver_too_old_for_torch_is_a_mismatch_with_both_versions(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = find_cuda(look_at_nvml())
    assert line.verdict == "mismatch"
    assert line.seen == "torch is built for CUDA 13.0, the driver 550.54 runs 12.4 at most"


def test_gpu_that_torch_gives_up_on_is_a_mismatch_with_the_reason(driver, monkeypatch):
    def give_up():
        raise RuntimeError("Unexpected error from cudaGetDeviceCount()\nmore")

    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.setattr(torch.cuda, "init", give_up)
    line = find_cuda(look_at_nvml())
    assert line.verdict == "mismatch"
    assert line.seen.endswith("torch can't use it (Unexpected error from cudaGetDeviceCount())")


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_the_user_hides_are_no_mismatch(driver, monkeypatch, value):
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    facts = look_at_nvml()
    line = find_cuda(facts)
    assert line.verdict == "missing"
    assert line.seen == f"CUDA_VISIBLE_DEVICES={value!r} hides 2 GPUs (NVIDIA H200)"
    assert find_device(facts).verdict == "ok"


@pytest.fixture
def usable(driver, monkeypatch):
    """One of the two GPUs, an sm_90, is visible to torch."""
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")


def test_usable_gpu_is_ok_and_those_left_out_are_counted(usable, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    line = find_cuda(look_at_nvml())
    assert line.verdict == "ok"
    assert line.seen == "NVIDIA H200 (140 GiB, sm_90), and 1 more that CUDA_VISIBLE_DEVICES hides"


def test_gpu_that_torch_has_no_code_for_is_a_mismatch(usable, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100", "sm_120"])
    line = find_cuda(look_at_nvml())
    assert line.verdict == "mismatch"
    assert line.remedy == "torch is built for sm_100 sm_120: install a build for sm_90"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((12, 0), ["sm_100", "compute_120"], True),
        ((10, 3), ["sm_100a"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_binary_code_runs_on_its_major_version_and_ptx_on_newer_ones(capability, architectures, runs):
    assert runs_on(capability, architectures) == runs


def test_cudnn_of_another_version_is_a_mismatch(monkeypatch):
    def refuse():
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against 9. PyTorch brings its own. Etc")

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    line = parts.find_cudnn()
    assert line.verdict == "mismatch"
    assert line.seen == "cuDNN version incompatibility: PyTorch was compiled against 9"


@pytest.mark.parametrize(("number", "shown"), [(91002, "9.10.2"), (8902, "8.9.2")])
def test_cudnn_version_is_written_out(monkeypatch, number, shown):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert parts.find_cudnn() == Finding("cuDNN", "ok", shown)


def test_ray_that_would_count_other_gpus_is_a_mismatch(no_gpu, monkeypatch):
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    line = parts.find_ray()
    assert line.verdict == "mismatch"
    assert line.seen.endswith("0 GPUs, but 'ray start' would count 3 GPUs")
    assert line.remedy.endswith("--num-gpus=0")


def test_other_version_than_pinned_is_a_mismatch(monkeypatch):
    monkeypatch.setattr(finding, "_installed", lambda package: "2.0.0+cpu")
    line = with_pin(Finding("torch", "ok", "2.0.0"), "torch")
    assert line.verdict == "mismatch"
    assert line.remedy.startswith(f"Esmeray is tested with {pinned_version('torch')}")
    monkeypatch.setattr(finding, "_installed", lambda package: f"{pinned_version('torch')}+cpu")
    assert with_pin(Finding("torch", "ok", "2.0.0"), "torch").verdict == "ok"


def test_pins_are_read_with_extras():
    assert pinned_version("ray")
    assert pinned_version("no-such-package") is None


def test_library_that_is_not_there_is_missing_and_one_that_breaks_a_mismatch(monkeypatch):
    def find():
        import deepspeed  # noqa: F401

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    line = guarded("DeepSpeed", find)
    assert (line.verdict, line.seen) == ("missing", "deepspeed is not installed")

    def broken():
        raise ImportError("libtorch.so: undefined symbol")

    line = guarded("DeepSpeed", broken)
    assert line.verdict == "mismatch"
    assert "undefined symbol" in line.seen


class Stream(io.StringIO):
    """Standard error that says when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_slow_part_says_that_it_is_waited_for_even_while_libraries_are_quieted(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(finding, "NOTE_AFTER_S", 0.0)
    with note_if_slow("looking at Ray ..."), quiet():
        print("noise", file=sys.stderr)
        assert stream.written.wait(60)
    assert stream.getvalue() == "looking at Ray ...\n"


def test_quick_part_says_nothing(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(finding, "NOTE_AFTER_S", 3600.0)
    with note_if_slow("looking at Ray ..."):
        pass
    assert stream.getvalue() == ""


def test_finding_is_one_line_whatever_it_holds():
    assert Finding("CUDA", "missing", "a\n b", "do this").line() == "CUDA           missing  a b; do this"


def test_help_teaches_by_example(command):
    outcome = command("gpu_check", "--help")
    assert outcome.code == 0
    assert "python -m tools gpu_check --verify" in outcome.out


def test_no_driver_on_a_cuda_build_is_missing_and_says_that_the_cpu_trains(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = find_cuda(NvmlFacts((), "", (0, 0), Finding("NVML", "missing", "")))
    assert line.verdict == "missing"
    assert line.remedy == parts.ON_CPU
