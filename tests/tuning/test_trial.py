"""A trial takes real training steps for a window, and reports failures."""

import time

import pytest
import torch

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.dataset.batches.steps import StepBatches
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.training.engine.step_clock import StepClock
from esmeray.tuning import trial as module
from esmeray.tuning.records import Measurement
from esmeray.tuning.section import MeasurementSection
from esmeray.tuning.trial import TrainingWork, measure_on_worker
from tests.runs import tiny_config

QUICK = MeasurementSection(window_s=0.1)
TOKENS_PER_STEP = 100
MARGIN_MIB = 150
"""More memory than a process keeps from other tests; the trial that fails needs far more."""


class ScriptedWork:
    """Steps that take given times on a simulated clock."""

    def __init__(self, monkeypatch, step_s: list[float]) -> None:
        self.now, self.step_s, self.steps = 0.0, step_s, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.clock = StepClock()

    def step(self, step: StepBatches, global_targets: int) -> bool:
        self.now += self.step_s[min(self.steps, len(self.step_s) - 1)]
        self.steps += 1
        return True


class OneStepEpochs:
    def epoch(self, epoch: int, start_step: int, first_step: int):
        yield StepBatches([], epoch, 0, epoch + 1, 0, num_tokens=TOKENS_PER_STEP, num_targets=1, seeds=[])


def measured(config, store_path, measurement=QUICK) -> Measurement:
    return measure_on_worker(config, WorkerContext(), store_path, measurement)


def test_window_is_measured_after_the_warm_up(process_group, monkeypatch):
    work = ScriptedWork(monkeypatch, [50.0, 1.0, 3.0])
    section = MeasurementSection(window_s=2.0)
    trial = module._Trial(WorkerContext(), section, ControlGroup(), MemoryMeter(torch.device("cpu")), 1, lambda: None)
    result = trial.run(work, OneStepEpochs())
    assert (result.status, result.tokens_per_s) == ("ok", 2 * TOKENS_PER_STEP / 4.0)
    assert work.steps == 1 + 2


def test_nan_is_seen_where_results_are_read_a_step_later(process_group, store_path, tmp_path, monkeypatch):
    """Results arrive a step late on a GPU."""
    steps = []

    class LateWork(TrainingWork):
        def step(self, step: StepBatches, global_targets: int) -> bool:
            self._late = True
            steps.append(step)
            if len(steps) == 2:
                for parameter in self._engine.module.parameters():
                    parameter.data.fill_(torch.nan)
            return super().step(step, global_targets)

    monkeypatch.setattr(module, "TrainingWork", LateWork)
    result = measured(tiny_config(tmp_path), store_path)
    assert result.status == "nan", result.reason
    assert len(steps) > 2


@pytest.mark.slow
def test_trial_beyond_the_memory_limit_frees_its_memory_for_the_next(process_group, store_path, tmp_path):
    config = tiny_config(tmp_path)
    enough = measured(config, store_path)
    limit_mib = enough.peak_memory_bytes / 2**20 + MARGIN_MIB
    training = {"cpu_memory_limit_mib": limit_mib}
    model = {"backbone": {"layers": 2, "hidden_size": 256}}
    batch = {"tokens": 65536, "global_tokens": 65536}
    failed = measured(tiny_config(tmp_path, model=model, training=training, batch=batch), store_path)
    assert failed.status == "out_of_memory"
    assert failed.peak_memory_bytes > failed.total_memory_bytes == int(limit_mib * 2**20)
    assert "out of memory" in failed.reason
    again = measured(tiny_config(tmp_path, training=training), store_path)
    assert again.status == "ok"
    assert again.peak_memory_bytes == pytest.approx(enough.peak_memory_bytes, abs=MARGIN_MIB * 2**20)
