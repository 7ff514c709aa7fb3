"""An unfinished folder is removed only by the command that created it, and never if its work can be resumed.

The journal of a job resumes after its last intact piece.
"""

import errno
import os
from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError, DataError, DiskFullError
from esmeray.common.publishing import MADE_FILE, RECORD_FILE, disk_full
from esmeray.run_folder.job import JOB_FILE, JOURNAL_FILE, LOCK_FILE, accept, journal, unfinished
from esmeray.run_folder.paths import RAY_SNAPSHOT, Outcome, RunFolder
from tests.damage import flipped, flips


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["mine/job.json", MADE_FILE, ".git/config", JOB_FILE, JOURNAL_FILE])
def test_what_the_command_did_not_make_is_refused_and_left_as_it_is(tmp_path: Path, name: str):
    (tmp_path / "v.partial" / name).parent.mkdir(parents=True)
    (tmp_path / "v.partial" / name).write_text("{}")
    before = contents(tmp_path)
    with (
        pytest.raises(
            ConfigError, match=rf"{tmp_path}/v.partial: already exists and was not written by Esmeray; move it away"
        ),
        unfinished(tmp_path / "v", "align"),
    ):
        pytest.fail("nothing may be computed")
    assert contents(tmp_path) == before


def begun(output: Path, made_by: str = "align", pieces: int = 1, error: BaseException | None = None) -> None:
    """Accept a job and complete ``pieces`` pieces of it; then return, or raise ``error``."""
    with unfinished(output, made_by) as folder:
        accept(folder, {"input": "a"})
        with journal(folder) as kept:
            for _ in range(pieces):
                kept.add(["a hit"])
        if error is not None:
            raise error


@pytest.mark.parametrize("pieces", [0, 1])
def test_the_work_of_another_job_is_refused_and_left(tmp_path: Path, pieces: int):
    with pytest.raises(KeyboardInterrupt):
        begun(tmp_path / "v", pieces=pieces, error=KeyboardInterrupt())
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"v.partial: contains the work of another job \(of align, not embed\)"):
        begun(tmp_path / "v", made_by="embed")
    with (
        pytest.raises(ConfigError, match=r"input was 'a', is now 'b'\); choose another output, or remove this folder"),
        unfinished(tmp_path / "v", "align") as folder,
    ):
        accept(folder, {"input": "b"})
    assert contents(tmp_path) == before
    begun(tmp_path / "v")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", [LOCK_FILE, f".{RECORD_FILE}.12345678.tmp"])
def test_what_a_process_leaves_that_is_killed_as_it_begins_is_taken(tmp_path: Path, name: str):
    (tmp_path / "v.partial").mkdir()
    (tmp_path / "v.partial" / name).touch()
    begun(tmp_path / "v")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_refused_job_leaves_its_pieces_or_nothing(tmp_path: Path, pieces: int):
    with pytest.raises(DataError):
        begun(tmp_path / "v", pieces=pieces, error=DataError("NaN"))
    assert (tmp_path / "v.partial").exists() == bool(pieces)
    with pytest.raises(DiskFullError) as refusal:
        begun(tmp_path / "v", pieces=0, error=disk_full(tmp_path / "v", os.strerror(errno.ENOSPC)))
    words = f"finished work is kept in {tmp_path}/v.partial; free some space, then resume with the same command"
    assert refusal.value.exit_code == 4 and (words in str(refusal.value)) == bool(pieces)


def test_a_new_start_forgets_the_requests_of_the_one_before(tmp_path: Path):
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    run.stop_request.touch()
    snapshot = run.path / RAY_SNAPSHOT
    snapshot.write_text('{"ray_version": "2.6')  # as a killed run leaves it
    run.checkpoints.mkdir()
    half_written = [run.path / ".outcome.json.12345678.tmp", run.checkpoints / ".latest.12345678.tmp"]
    for path in half_written:
        path.touch()
    run.clear_requests()
    assert not run.end_requested() and not any(path.exists() for path in (snapshot, *half_written))


def test_an_outcome_with_a_flipped_bit_is_ignored_with_a_line(tmp_path: Path, caplog):
    run, outcome = RunFolder(tmp_path, "run"), Outcome("finished", 8, "trained 8 steps", 0)
    run.path.mkdir()
    run.write_outcome(outcome)
    for bit in flips(run.outcome, 300, seed=1):
        caplog.clear()
        with flipped(run.outcome, bit):
            assert run.read_outcome() == (None if caplog.records else outcome), bit


PIECES = [["p1\tq1\t0.5", "p1\tq2 \u2028\x0b\t0.25"], [], ["p2*", "IJ", "ä"], [f"p{n}\t{n}" for n in range(15)]]


def resumed(folder: Path) -> str:
    """Complete the job and return all lines."""
    with journal(folder) as kept:
        for piece in PIECES[kept.done :]:
            kept.add(piece)
        return "".join(kept.lines())


def test_a_flipped_bit_or_a_kill_costs_the_pieces_behind_it(tmp_path: Path):
    wanted = "".join(f"{line}\n" for piece in PIECES for line in piece)
    assert resumed(tmp_path) == wanted
    path = tmp_path / JOURNAL_FILE
    for bit in flips(path, 200, seed=1):
        with flipped(path, bit):
            assert resumed(tmp_path) == wanted, bit
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert resumed(tmp_path) == wanted, length
    lines = content.splitlines(keepends=True)
    for others in (lines[1:], [lines[0], *lines], lines[::-1]):  # pieces that are missing, repeated or in another order
        path.write_bytes(b"".join(others))
        assert resumed(tmp_path) == wanted


def test_a_journal_that_is_damaged_while_the_job_runs_is_refused(tmp_path: Path):
    resumed(tmp_path)
    with journal(tmp_path) as kept:
        pass
    refused = pytest.raises(DataError, match=r"done\.jsonl: damaged in piece 1; run the same command again")
    with flipped(tmp_path / JOURNAL_FILE, 8), refused:
        list(kept.lines())
