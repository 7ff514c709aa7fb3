from pathlib import Path

from esmeray.run_folder.paths import RAY_SNAPSHOT, Outcome, RunFolder
from tests.damage import flipped, flips


def test_a_new_start_forgets_what_was_asked_of_the_one_before_and_what_ray_kept_of_it(tmp_path: Path):
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    run.request_stop()
    snapshot = run.path / RAY_SNAPSHOT
    snapshot.write_text('{"ray_version": "2.6')  # as a killed run leaves it
    run.clear_requests()
    assert not run.end_requested() and not snapshot.exists()


def test_an_outcome_with_a_flipped_bit_is_passed_over_with_a_line_or_the_same(tmp_path: Path, caplog):
    run, outcome = RunFolder(tmp_path, "run"), Outcome("finished", 8, "trained 8 steps", 0)
    run.path.mkdir()
    run.write_outcome(outcome)
    for bit in flips(run.outcome, 300, seed=1):
        caplog.clear()
        with flipped(run.outcome, bit):
            assert run.read_outcome() == (None if caplog.records else outcome), bit
