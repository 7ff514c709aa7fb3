import gzip
import hashlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from esmeray.cluster import connection
from esmeray.common.errors import CheckpointError, ConfigError, DataError, ResourceError
from esmeray.run_folder.paths import RunFolder
from esmeray.training.config import Config
from esmeray.training.launch.driver import dry_run, train
from tests.runs import run_folder, tiny_config
from tests.training.runs import finish


def write_fasta(path: Path, seed: int) -> str:
    draw = random.Random(seed)
    records = (f">p{number}\n{''.join(draw.choices('ACDEFGHIKL', k=40))}\n" for number in range(60))
    path.write_text("".join(records))
    return str(path)


@pytest.fixture(scope="module")
def finished(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("finished")
    config = settings(folder, write_fasta(folder / "clean.fasta", seed=0))
    finish(config)
    run_folder(config).curves.touch()  # the driver draws them
    return config


def settings(folder: Path, source: str, **changes: Any) -> Config:
    changes.setdefault("training", {"max_steps": 2, "warmup_steps": 1})
    data = {"source": [source], "validation_share": 0.1}
    return tiny_config(folder, data=data, ray={"num_workers": 1, "address": "local"}, **changes)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(section: object) -> Iterator[str]:
        pytest.fail("Ray was started")
        yield ""

    monkeypatch.setattr(connection, "connected", refused)


def content(run: RunFolder) -> dict[str, str]:
    files = (path for path in run.path.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def truncated(folder: Path) -> str:
    whole = gzip.compress(Path(write_fasta(folder / "some.fasta", seed=0)).read_bytes())
    (folder / "cut.fasta.gz").write_bytes(whole[:-20])
    return str(folder / "cut.fasta.gz")


REFUSALS = {
    "other data": (
        lambda folder: {"source": write_fasta(folder / "other.fasta", seed=1)},
        CheckpointError,
        r"was trained on .*clean\.fasta \(checksum .*\), not on.*other\.fasta \(checksum",
    ),
    "no data": (lambda folder: {"source": str(folder / "none.fasta")}, DataError, r"none\.fasta"),
    "truncated data": (lambda folder: {"source": truncated(folder)}, DataError, r"cut\.fasta\.gz"),
    "other rate": (
        lambda folder: {"training": {"max_steps": 2, "warmup_steps": 1, "learning_rate": 0.5}},
        ConfigError,
        r"training\.learning_rate was 0\.01, is now 0\.5, but the run tiny is finished",
    ),
    "other model": (
        lambda folder: {"model": {"backbone": {"hidden_size": 32}}},
        ConfigError,
        r"model\.backbone\.hidden_size was 16, is now 32, but the run tiny already has checkpoints",
    ),
    "fewer steps": (
        lambda folder: {"training": {"max_steps": 1, "warmup_steps": 0}},
        ConfigError,
        r"training\.max_steps was 2, is now 1, .* the run tiny is already at step 2",
    ),
}


@pytest.mark.parametrize("command", [train, dry_run])
@pytest.mark.parametrize("refused", REFUSALS)
def test_command_that_contradicts_a_finished_run_is_refused(finished, tmp_path, command, refused):
    change, refusal, message = REFUSALS[refused]
    run = run_folder(finished)
    before = content(run)
    stores = sorted(run.stores.iterdir())
    with pytest.raises(refusal, match=message):
        command(settings(run.path.parent, **{"source": finished.data.source[0], **change(tmp_path)}))
    assert content(run) == before
    assert command is train or sorted(run.stores.iterdir()) == stores, "a dry run leaves no store"


@pytest.mark.parametrize("command", [train, dry_run])
def test_finished_run_is_recognized_after_moved_data_or_changed_defaults(finished, tmp_path, command, capsys):
    run = run_folder(finished)
    before = content(run)
    moved = shutil.copy(finished.data.source[0], tmp_path / "moved.fasta")
    elsewhere = settings(run.path.parent, str(moved), monitoring={"peak_tflops": 1.0})
    data = elsewhere.data.model_copy(update={"stage_dir": str(tmp_path / "local")})
    assert command(elsewhere.model_copy(update={"data": data})) == 0
    assert "run tiny is finished" in capsys.readouterr().out
    assert content(run) == before
    shutil.copytree(run.path.parent, tmp_path / "runs")
    by_default = {"max_steps": 2, "warmup_steps": None}
    config = settings(tmp_path / "runs", finished.data.source[0], training=by_default)
    run = run_folder(config)
    # The former default of the warm-up was 100 steps, even for shorter runs.
    run.config.write_text(run.config.read_text().replace("warmup_steps: 1\n", "warmup_steps: 100\n"))
    assert command(config) == 0
    assert "run tiny is finished" in capsys.readouterr().out


def test_curves_that_a_kill_left_out_are_drawn_by_the_same_command(finished, tmp_path):
    shutil.copytree(run_folder(finished).path.parent, tmp_path / "runs")
    config = settings(tmp_path / "runs", finished.data.source[0])
    run_folder(config).curves.unlink(missing_ok=True)
    assert train(config) == 0
    assert run_folder(config).curves.exists()


def test_new_run_refuses_a_folder_with_a_users_files(tmp_path):
    config = settings(tmp_path, write_fasta(tmp_path / "a.fasta", seed=0))
    run = run_folder(config)
    run.tokenizer.mkdir(parents=True)
    (run.tokenizer / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=rf"{run.path}: already exists and was not written by Esmeray; move it away"):
        train(config)
    assert [path for path in run.path.rglob("*") if path.is_file()] == [run.tokenizer / "mine.txt"]


def test_refused_new_run_leaves_no_folder(tmp_path):
    with pytest.raises(DataError):
        train(settings(tmp_path / "runs", str(tmp_path / "none.fasta")))
    assert not (tmp_path / "runs" / "tiny").exists()
    (tmp_path / "a file").touch()
    for storage in ("a file", "a file/runs"):
        with pytest.raises(ResourceError, match=r"a file.*: can't be written: (File exists|Not a directory)"):
            train(settings(tmp_path / storage, write_fasta(tmp_path / "some.fasta", seed=0)))


@pytest.mark.parametrize("command", [train, dry_run])
def test_run_with_a_users_file_in_its_export_is_refused_before_training(finished, tmp_path, command):
    shutil.copytree(run_folder(finished).path.parent, tmp_path / "runs")
    config = settings(tmp_path / "runs", finished.data.source[0], training={"max_steps": 4, "warmup_steps": 1})
    (run_folder(config).export / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains notes\.txt, which export did not write"):
        command(config)
    assert (run_folder(config).export / "notes.txt").read_text() == "mine"
