"""What contenders are given and what they answer survive the way between processes."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.programs.training_workload import StepLine, StepLines, Workload, read_step_lines
from benchmarks.stages.training import BUDGET_MULTIPLE, token_budget

WORKLOAD = Workload(
    fasta="p.fasta", store="store", weights="weights", sequences=8, accumulation=2, tokens=2560, warmup_steps=2, steps=4
)


def test_a_workload_read_from_its_argument_is_the_same():
    assert Workload.from_json(WORKLOAD.to_json()) == WORKLOAD


def test_steps_that_are_not_measured_are_trained_all_the_same():
    assert WORKLOAD.total_steps == 6


def test_step_lines_are_read_as_they_were_written_even_where_the_writer_was_killed_after_a_line(tmp_path):
    written = [StepLine(step, 0.5, 100, 250, 3.5, 2**30, 2**20) for step in (1, 2)]
    lines = StepLines(tmp_path / "lines")
    for line in written:
        lines.write(line)
        assert read_step_lines(tmp_path / "lines")[-1] == line
    lines.close()
    assert read_step_lines(tmp_path / "lines") == written


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 32))
def test_a_packed_batch_holds_the_longest_protein_and_what_the_padded_one_holds_on_average(lengths, batch):
    sequences = ["A" * length for length in lengths]
    tokens = [min(length, 1022) + 2 for length in lengths]
    budget = token_budget(sequences, batch)
    assert budget >= max(tokens)
    mean = batch * sum(tokens) / len(tokens)
    assert abs(budget - mean) <= BUDGET_MULTIPLE / 2 or budget == max(tokens)
