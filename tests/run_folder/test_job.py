"""An unfinished folder is removed only by the command that made it, and never with work that can be resumed."""

import errno
import os
from pathlib import Path

import pytest

from common.errors import ConfigError, DataError, DiskFullError
from common.publishing import MADE_FILE, RECORD_FILE, disk_full, made_folder
from run_folder.job import LOCK_FILE, accept, journal, unfinished


def foreign(kind: str, folder: Path) -> None:
    """What a user, or another command, may have under the name of the unfinished folder."""
    if kind == "file":
        folder.write_text("a thesis")
    elif kind == "link":
        folder.symlink_to(folder.parent)
    elif kind == "output":
        with made_folder(folder, "align", False) as building:
            (building / "file").write_text("mine")
    else:
        (folder / "mine").mkdir(parents=True)
        (folder / "mine" / "job.json").write_text("{}")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", ["folder", "file", "link", "output"])
def test_what_the_command_did_not_make_is_refused_and_left_as_it_is(tmp_path: Path, kind: str):
    foreign(kind, tmp_path / "v.partial")
    before = contents(tmp_path)
    with (
        pytest.raises(ConfigError, match=rf"{tmp_path}/v.partial: is in the way, .* move it away"),
        unfinished(tmp_path / "v", "align"),
    ):
        pytest.fail("nothing may be computed")
    assert contents(tmp_path) == before


def begun(output: Path, made_by: str = "align", pieces: int = 1, error: BaseException | None = None) -> None:
    """Accept a job and do so many pieces of it; then end, or as the error says."""
    with unfinished(output, made_by) as folder:
        accept(folder, {"input": "a"})
        with journal(folder) as kept:
            for _ in range(pieces):
                kept.add(["a hit"])
        if error is not None:
            raise error


def test_the_work_of_another_command_is_refused_by_its_name_and_resumed_by_its_own(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        begun(tmp_path / "v", error=KeyboardInterrupt())
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"v.partial: holds the work of another job \(of align, this is embed\)"):
        begun(tmp_path / "v", made_by="embed")
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
def test_a_job_that_is_refused_leaves_its_pieces_or_nothing(tmp_path: Path, pieces: int):
    with pytest.raises(DataError):
        begun(tmp_path / "v", pieces=pieces, error=DataError("NaN"))
    assert (tmp_path / "v.partial").exists() == bool(pieces)


def test_a_refusal_leaves_the_job_of_an_earlier_process(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        begun(tmp_path / "v", pieces=0, error=KeyboardInterrupt())
    before = contents(tmp_path / "v.partial")
    with (
        pytest.raises(ConfigError, match=r"input was 'a', is now 'b'\); choose another output, or remove this folder"),
        unfinished(tmp_path / "v", "align") as folder,
    ):
        accept(folder, {"input": "b"})
    assert contents(tmp_path / "v.partial").keys() == before.keys()


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_full_disk_says_that_the_job_resumes_where_there_is_something_to_resume(tmp_path: Path, pieces: int):
    with pytest.raises(DiskFullError) as refusal:
        begun(tmp_path / "v", pieces=pieces, error=disk_full(tmp_path / "v", os.strerror(errno.ENOSPC)))
    assert refusal.value.exit_code == 4 and "nothing was left" not in str(refusal.value)
    words = f"what is done stays in {tmp_path}/v.partial, and the same command resumes once there is room"
    assert (words in str(refusal.value)) == bool(pieces)


def test_the_record_is_what_a_removal_leaves_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    removed: list[str] = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: removed.append(Path(path).name))
    with unfinished(tmp_path / "v", "embed") as folder:
        (folder / "model").mkdir()
        (folder / "logs" / MADE_FILE).parent.mkdir()
    assert sorted(removed[:2]) == ["logs", "model"] and removed[2] == "v.partial"
