"""The journal of a job resumes behind its last sound piece."""

from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError, DataError, EsmerayError
from esmeray.run_folder.job import JOB_FILE, JOURNAL_FILE, accept, journal
from tests.damage import flipped, flips

PIECES = [["p1\tq1\t0.5", "p1\tq2 \u2028\x0b\t0.25"], [], ["p2*", "IJ", "ä"], [f"p{n}\t{n}" for n in range(15)]]


def resumed(folder: Path) -> str:
    """All lines once the job has done what is missing."""
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


def test_a_journal_that_is_damaged_while_the_job_runs_is_refused(tmp_path: Path):
    resumed(tmp_path)
    with journal(tmp_path) as kept:
        pass
    refused = pytest.raises(DataError, match=r"done\.tsv: damaged in piece 1; start the same command again")
    with flipped(tmp_path / JOURNAL_FILE, 8), refused:
        list(kept.lines())


def test_a_flipped_bit_of_the_identity_of_a_job_is_one_line(tmp_path: Path):
    job = {"model": "a" * 8, "settings": {"tokens": 64, "layers": [-1]}}
    accept(tmp_path, job)
    path = tmp_path / JOB_FILE
    for bit in range(8 * path.stat().st_size):
        with flipped(path, bit):
            try:
                accept(tmp_path, job)
            except EsmerayError as refused:
                assert isinstance(refused, ConfigError | DataError) and "\n" not in str(refused)
