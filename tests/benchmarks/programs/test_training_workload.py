"""Workloads and steps survive the way between processes."""

import json
from dataclasses import asdict

from benchmarks.programs.memory_meter import Peak
from benchmarks.programs.training_workload import StepLine, StepLines, Workload, tokens_per_s

WORKLOAD = Workload(
    fasta="p.fasta", store="store", weights="weights", sequences=8, accumulation=2, tokens=2560, warmup_steps=2, steps=4
)


def test_a_workload_read_from_its_argument_is_the_same():
    assert Workload.from_json(WORKLOAD.to_json()) == WORKLOAD
    assert WORKLOAD.total_steps == 6


def test_a_step_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    lines = StepLines(str(tmp_path / "lines"))
    lines.write(1, 0.5, 100, 250, 3.5, Peak(2**20, None, 2**30))
    assert json.loads((tmp_path / "lines").read_text()) == asdict(StepLine(1, 0.5, 100, 250, 3.5, 2**20, 2**30))


def test_tokens_a_second_weigh_each_step_by_its_time():
    assert tokens_per_s([(100, 1.0), (100, 3.0)]) == 50
