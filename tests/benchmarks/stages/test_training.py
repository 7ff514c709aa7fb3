"""The training stage measures the same work and refuses where it isn't."""

from pathlib import Path

import pytest

from benchmarks.harness.proteins import read_proteins
from benchmarks.harness.stage import Setting, WrongWorkError
from benchmarks.programs import training_process
from benchmarks.programs.training_process import run_contender
from benchmarks.programs.training_workload import StepLine, Workload
from benchmarks.stages.training import LOSS_TOLERANCE, OURS, TRAINER, Runs, _network, prepare, tokens_per_s


def a_workload(**changes) -> Workload:
    values = {"sequences": 4, "accumulation": 2, "tokens": 1024, "warmup_steps": 1, "steps": 2} | changes
    return Workload(fasta="", store="", weights="", **values)


def a_line(step: int, seconds: float = 1.0, tokens: int = 100, loss: float = 3.0, peak: int = 0) -> StepLine:
    return StepLine(step, seconds, tokens, 2 * tokens, loss, peak, 0)


@pytest.fixture
def answers(monkeypatch) -> dict[str, list[StepLine]]:
    """Lines that contenders answer with, by program."""
    lines: dict[str, list[StepLine]] = {}
    monkeypatch.setattr(training_process, "run_contender", lambda module, *_: lines[module])
    return lines


def test_first_steps_are_not_measured(answers, tmp_path):
    answers["ours"] = [a_line(1, seconds=100), a_line(2, seconds=1, tokens=10), a_line(3, seconds=4, tokens=40)]
    assert Runs(a_workload(), tmp_path, LOSS_TOLERANCE).run(OURS, "ours") == 10


def test_tokens_a_second_weigh_each_step_by_its_time():
    assert tokens_per_s([a_line(1, seconds=1, tokens=100), a_line(2, seconds=3, tokens=100)]) == 50


def test_contenders_that_learn_otherwise_are_no_comparison(answers, tmp_path):
    answers["ours"] = [a_line(step, loss=3.0) for step in (1, 2, 3)]
    answers["peer"] = [a_line(step, loss=3.0 + 2 * LOSS_TOLERANCE) for step in (1, 2, 3)]
    runs = Runs(a_workload(), tmp_path, LOSS_TOLERANCE)
    runs.run(OURS, "ours")
    with pytest.raises(WrongWorkError, match=r"Trainer.* loss of 3\.2"):
        runs.run(TRAINER, "peer")


def test_a_loss_that_is_no_number_is_no_comparison(answers, tmp_path):
    answers["ours"] = [a_line(step, loss=3.0) for step in (1, 2, 3)]
    answers["peer"] = [a_line(step, loss=float("nan")) for step in (1, 2, 3)]
    runs = Runs(a_workload(), tmp_path, LOSS_TOLERANCE)
    runs.run(OURS, "ours")
    with pytest.raises(WrongWorkError):
        runs.run(TRAINER, "peer")


def test_other_cases_take_the_runs_that_were_made_round_by_round(answers, tmp_path):
    runs = Runs(a_workload(), tmp_path, LOSS_TOLERANCE)
    for peak in (10, 20):
        answers["ours"] = [a_line(step, peak=peak) for step in (1, 2, 3)]
        runs.run(OURS, "ours")
    contender = runs.replay(OURS, lambda steps: steps[-1].peak_bytes)
    assert [contender.run(), contender.run()] == [10, 20]


def test_a_program_that_fails_is_told_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"after 0 steps(.|\n)*No module named benchmarks\.no_such_program"):
        run_contender("benchmarks.no_such_program", a_workload(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def real_workload(tmp_path_factory) -> Workload:
    """A toy model on real files."""
    folder = tmp_path_factory.mktemp("training")
    fasta = folder / "some.fasta"
    fasta.write_text("".join(f">p{number}\n{'MKTAYIAKQR' * (1 + number)}\n" for number in range(60)))
    setting = Setting(device="cpu", quick=True, folder=folder)
    return prepare(setting, read_proteins(fasta), _network(setting))


@pytest.mark.slow
def test_both_sides_start_from_the_same_weights_and_only_the_peer_pads(real_workload, tmp_path):
    pytest.importorskip("accelerate")
    ours = run_contender("benchmarks.programs.training_contender", real_workload, tmp_path)
    peer = run_contender("benchmarks.programs.trainer", real_workload, tmp_path, "random")
    assert ours[0].loss == pytest.approx(peer[0].loss, abs=0.1)
    assert all(line.tokens == line.computed_tokens for line in ours)
    assert all(line.tokens < line.computed_tokens for line in peer)
    assert sum(line.tokens for line in ours) == pytest.approx(sum(line.tokens for line in peer), rel=0.5)
    assert all(line.peak_bytes >= line.built_bytes > 0 for line in ours + peer)
    assert not list(Path(tmp_path).iterdir())
