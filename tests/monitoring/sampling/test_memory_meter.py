import psutil
import pytest
import torch

from esmeray.model.device import is_out_of_memory
from esmeray.monitoring.sampling import memory_meter
from esmeray.monitoring.sampling.memory_meter import MemoryMeter

CPU = torch.device("cpu")
MIB = 2**20
PAGES = 2 * MIB
"""Tolerance in bytes: the kernel counts some pages per thread and adds these counts up only occasionally."""


def test_the_peak_keeps_freed_memory_until_it_is_reset():
    meter = MemoryMeter(CPU)
    meter.free()
    before = meter.peak_bytes()
    limited = MemoryMeter(CPU, before / MIB + 32)
    assert limited.total_bytes() == before + 32 * MIB
    limited.check()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    assert meter.peak_bytes() - before == pytest.approx(64 * MIB, abs=PAGES)
    with pytest.raises(torch.OutOfMemoryError, match="more than its limit"):
        limited.check()
    limited.free()  # if the block came from the heap, the heap keeps its pages
    assert meter.peak_bytes() - before == pytest.approx(0, abs=PAGES)
    limited.check()


def test_sandbox_that_does_not_reset_the_peak_gives_the_memory_in_use(monkeypatch):
    monkeypatch.setattr(memory_meter, "PROC", memory_meter.PROC / "no-such-folder")
    assert MemoryMeter(CPU).peak_bytes() == pytest.approx(psutil.Process().memory_info().rss, abs=PAGES)


def test_out_of_memory_errors_are_recognized():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
