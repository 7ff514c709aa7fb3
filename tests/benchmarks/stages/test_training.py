"""The training stages measure the same work for all programs, and fail otherwise."""

import json
import multiprocessing
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.inputs import make_store, write_fasta
from benchmarks.harness.stage import WrongWorkError
from benchmarks.peers.transformers_embedding import write_model
from benchmarks.programs import processes, trainings
from benchmarks.programs.trainings import TOY, Step, in_process
from benchmarks.stages import training
from benchmarks.stages.training import OURS, TRAINER, compare_losses, last_loss
from esmeray.training.loop.building import Worker
from tests.worker_group import WorkerGroup


def test_the_loss_of_the_later_half_is_weighted_by_tokens():
    steps = [Step(100, 100, 200, 9.0), Step(1, 10, 200, 3.0), Step(4, 30, 200, 1.0)]
    assert last_loss(steps) == 1.5


@pytest.mark.parametrize("loss", [3.0 + 2 * training.LOSS_TOLERANCE, float("nan")])
def test_contenders_with_other_losses_are_no_comparison(loss):
    compare_losses({OURS: 3.0, TRAINER: 3.0 + training.LOSS_TOLERANCE / 2})
    with pytest.raises(WrongWorkError, match=r"losses differ .*Trainer"):
        compare_losses({OURS: 3.0, TRAINER: loss})


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 32))
def test_a_packed_batch_has_the_padded_batchs_mean_number_of_tokens(lengths, batch):
    tokens = [min(length, 1022) + 2 for length in lengths]
    budget = training.token_budget(["A" * length for length in lengths], batch)
    assert budget >= max(tokens)
    mean = batch * sum(tokens) / len(tokens)
    assert abs(budget - mean) <= training.BUDGET_MULTIPLE / 2 or budget == max(tokens)


def ours_in_a_lasting_process(arguments: dict[str, Any]) -> Any:
    """Train, then clean up what would end with a process of its own."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        original = trainings.build_worker

        def build_worker(*given: Any) -> Worker:
            worker = original(*given)
            stack.callback(worker.observers.close)
            return worker

        patch.setattr(trainings, "build_worker", build_worker)
        # In worker processes, transformers' collator draws masks without a seed.
        patch.setattr(multiprocessing.current_process(), "name", "MainProcess")
        return trainings.ours(**arguments)


@pytest.mark.slow
def test_both_sides_start_from_the_same_weights_and_only_the_peer_pads(
    tmp_path, monkeypatch: pytest.MonkeyPatch, worker_group: WorkerGroup
):
    pytest.importorskip("accelerate")

    def call(function: str, **arguments: Any) -> Any:
        if function.endswith(":trainer"):  # transformers' Trainer changes settings of its process
            return processes.call(function, **arguments)
        given = json.loads(json.dumps(arguments, default=asdict))
        return asdict(worker_group.results(partial(ours_in_a_lasting_process, given))[0])

    monkeypatch.setattr(trainings, "call", call)
    fasta = write_fasta(tmp_path / "some.fasta", ["MKTAYIAKQR" * (1 + number) for number in range(60)])
    store = make_store(fasta, tmp_path)
    weights = write_model(tmp_path / "weights", "esm2_t6_8M", **TOY)
    config = training.our_config(str(fasta), weights, 1280, 3)
    arguments = training.trainer_arguments(4, 3, "random", "cpu")
    ours = in_process("ours", tmp_path, config=config, store=str(store), held_out=str(fasta))
    options = {"weights": weights, "fasta": str(fasta), "residues": 1022, "held_out": str(fasta)}
    peer = in_process("trainer", tmp_path, arguments=arguments, **options)
    assert len(ours.steps) == len(peer.steps) == 3
    assert ours.steps[0].loss == pytest.approx(peer.steps[0].loss, abs=0.1)
    assert all(step.tokens == step.computed_tokens for step in ours.steps)
    assert all(step.tokens < step.computed_tokens for step in peer.steps)
    tokens = [sum(step.tokens for step in side.steps) for side in (ours, peer)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.5)
    assert ours.memory_bytes >= 0 and peer.memory_bytes >= 0
    assert ours.bits == pytest.approx(peer.bits, abs=0.1)
