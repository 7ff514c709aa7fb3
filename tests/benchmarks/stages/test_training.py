"""The stages that train measure the same work and refuse where it isn't."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.models import random_network
from benchmarks.harness.proteins import read_proteins
from benchmarks.harness.stage import Setting, WrongWorkError
from benchmarks.programs import processes, training_workload, worker_alone
from benchmarks.programs.training_workload import TOY, StepLine, Workload, run_contender
from benchmarks.stages import runs, training
from benchmarks.stages.training import OURS, TRAINER, Runs, prepare
from esmeray.training.loop.building import Worker
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences
from tests.worker_group import WorkerGroup


def a_run(loss: float = 3.0) -> list[StepLine]:
    """Three steps, of which the first took long."""
    return [StepLine(seconds, tokens, 200, loss, 0) for seconds, tokens in ((100, 100), (1, 10), (4, 40))]


@pytest.mark.parametrize("loss", [3.0 + 2 * training.LOSS_TOLERANCE, float("nan")])
def test_first_steps_are_not_measured_and_contenders_that_learn_otherwise_are_no_comparison(tmp_path, loss):
    workload = Workload("", "", "", sequences=4, accumulation=2, tokens=1024, warmup_steps=1, steps=2)
    contenders = Runs(workload, tmp_path, training.LOSS_TOLERANCE)
    assert contenders.add(OURS, a_run()) == 10
    with pytest.raises(WrongWorkError, match=r"Trainer.* loss of"):
        contenders.add(TRAINER, a_run(loss))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 32))
def test_a_packed_batch_holds_the_longest_protein_and_what_the_padded_one_holds_on_average(lengths, batch):
    tokens = [min(length, 1022) + 2 for length in lengths]
    budget = training.token_budget(["A" * length for length in lengths], batch)
    assert budget >= max(tokens)
    mean = batch * sum(tokens) / len(tokens)
    assert abs(budget - mean) <= training.BUDGET_MULTIPLE / 2 or budget == max(tokens)


def called(function: str, arguments: dict[str, Any]) -> Any:
    """In a lasting process: what a worker has beside training, which would end with its process, is ended."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        honest = worker_alone.build_worker

        def build_worker(*given: Any) -> Worker:
            worker = honest(*given)
            stack.callback(worker.observers.close)
            return worker

        patch.setattr(worker_alone, "build_worker", build_worker)
        return resolve_name(function)(**arguments)


@pytest.fixture
def lasting_processes(monkeypatch: pytest.MonkeyPatch, worker_group: WorkerGroup) -> None:
    """Call in lasting processes what a stage calls in processes of its own: importing torch takes a new one longest."""

    def call(function: str, **arguments: Any) -> Any:
        if "worker_alone" not in function:  # transformers' Trainer leaves settings behind in its process
            return processes.call(function, **arguments)
        given = json.loads(json.dumps(arguments, default=asdict))
        return json.loads(json.dumps(worker_group.results(partial(called, function, given)), default=asdict))[0]

    def run_program(command: list[str], environment: dict[str, str]) -> None:
        assert worker_group.results(partial(worker_alone.main, command[-1])) == [0]

    monkeypatch.setattr(runs, "run_program", run_program)
    monkeypatch.setattr(training_workload, "call", call)


@pytest.mark.slow
@pytest.mark.usefixtures("lasting_processes")
def test_both_sides_start_from_the_same_weights_and_only_the_peer_pads(tmp_path):
    pytest.importorskip("accelerate")
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">p{number}\n{'MKTAYIAKQR' * (1 + number)}\n" for number in range(60)))
    setting = Setting(device="cpu", quick=True, folder=tmp_path)
    workload = prepare(setting, read_proteins(fasta), random_network("esm2_t6_8M", **TOY))
    ours = run_contender("benchmarks.programs.worker_alone:train", workload, tmp_path)
    peer = run_contender("benchmarks.programs.trainer:train", workload, tmp_path, sampling="random")
    assert ours[0].loss == pytest.approx(peer[0].loss, abs=0.1)
    assert all(line.tokens == line.computed_tokens for line in ours)
    assert all(line.tokens < line.computed_tokens for line in peer)
    assert sum(line.tokens for line in ours) == pytest.approx(sum(line.tokens for line in peer), rel=0.5)
    assert all(line.memory_bytes >= 0 for line in ours + peer)


@pytest.mark.slow
@pytest.mark.usefixtures("lasting_processes")
def test_a_head_is_trained_from_cached_and_from_computed_features(tmp_path):
    fasta = write_proteins(tmp_path / "short.fasta", random_sequences([60] * 100))
    setting = Setting(device="cpu", quick=True, folder=tmp_path, fasta=fasta)
    case = next(iter(runs.STAGE.cases(setting)))  # type: ignore[arg-type]
    assert all(contender.run() > 0 for contender in case.contenders)
    assert "seconds of the run that computed the features" in case.facts


def test_runs_of_other_losses_are_no_comparison(tmp_path):
    head = runs.TrainingRuns(Setting(device="cpu", quick=True, folder=tmp_path), runs.HEAD)  # 1e-4 is allowed
    head.compare([3.0, 2.0])
    head.compare([3.0, 2.0 + 1e-5])
    with pytest.raises(WrongWorkError):
        head.compare([3.0, 2.1])
