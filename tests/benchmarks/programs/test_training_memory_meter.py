"""Peak memory is that of the steps, not of what came before."""

import psutil
import pytest
import torch

from benchmarks.programs.training_memory_meter import MemoryMeter

MIB = 2**20


@pytest.fixture(autouse=True)
def no_loader_processes(monkeypatch):
    """The processes of other tests, a Ray cluster say, are children of this one too."""
    monkeypatch.setattr(psutil.Process, "children", lambda self: [])


def test_memory_taken_and_given_back_during_the_steps_counts():
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    large = torch.ones(64 * MIB)
    assert large.sum() > 0
    del large
    assert meter.peak_bytes - meter.built_bytes >= 250 * MIB


def test_memory_of_building_does_not_count():
    large = torch.ones(64 * MIB)
    assert large.sum() > 0
    del large
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    assert meter.peak_bytes - meter.built_bytes < 100 * MIB
