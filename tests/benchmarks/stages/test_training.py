"""The training stage measures the same work and refuses where it isn't."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esmeray.benchmarks.harness.models import random_network
from esmeray.benchmarks.harness.proteins import read_proteins
from esmeray.benchmarks.harness.stage import Setting, WrongWorkError
from esmeray.benchmarks.programs.training_workload import TOY, StepLine, Workload, run_contender
from esmeray.benchmarks.stages import training
from esmeray.benchmarks.stages.training import OURS, TRAINER, Runs, prepare


def a_run(loss: float = 3.0) -> list[StepLine]:
    """Three steps, of which the first took long."""
    return [StepLine(seconds, tokens, 200, loss, 0) for seconds, tokens in ((100, 100), (1, 10), (4, 40))]


@pytest.mark.parametrize("loss", [3.0 + 2 * training.LOSS_TOLERANCE, float("nan")])
def test_first_steps_are_not_measured_and_contenders_that_learn_otherwise_are_no_comparison(tmp_path, loss):
    workload = Workload("", "", "", sequences=4, accumulation=2, tokens=1024, warmup_steps=1, steps=2)
    runs = Runs(workload, tmp_path, training.LOSS_TOLERANCE)
    assert runs.add(OURS, a_run()) == 10
    with pytest.raises(WrongWorkError, match=r"Trainer.* loss of"):
        runs.add(TRAINER, a_run(loss))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 32))
def test_a_packed_batch_holds_the_longest_protein_and_what_the_padded_one_holds_on_average(lengths, batch):
    tokens = [min(length, 1022) + 2 for length in lengths]
    budget = training.token_budget(["A" * length for length in lengths], batch)
    assert budget >= max(tokens)
    mean = batch * sum(tokens) / len(tokens)
    assert abs(budget - mean) <= training.BUDGET_MULTIPLE / 2 or budget == max(tokens)


@pytest.mark.slow
def test_both_sides_start_from_the_same_weights_and_only_the_peer_pads(tmp_path):
    pytest.importorskip("accelerate")
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">p{number}\n{'MKTAYIAKQR' * (1 + number)}\n" for number in range(60)))
    setting = Setting(device="cpu", quick=True, folder=tmp_path)
    workload = prepare(setting, read_proteins(fasta), random_network("esm2_t6_8M", **TOY))
    ours = run_contender("esmeray.benchmarks.programs.worker_alone:train", workload, tmp_path)
    peer = run_contender("esmeray.benchmarks.programs.trainer:train", workload, tmp_path, sampling="random")
    assert ours[0].loss == pytest.approx(peer[0].loss, abs=0.1)
    assert all(line.tokens == line.computed_tokens for line in ours)
    assert all(line.tokens < line.computed_tokens for line in peer)
    assert sum(line.tokens for line in ours) == pytest.approx(sum(line.tokens for line in peer), rel=0.5)
    assert all(line.memory_bytes >= 0 for line in ours + peer)
