"""The command line as a user meets it."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from common.command_line import run
from tools.__main__ import entry_point, main
from train_config.loading import known_keys
from train_config.tune_schema import TuneConfig

REPOSITORY = Path(__file__).resolve().parents[1]
SEARCH = REPOSITORY / "train_config" / "tune_throughput.yaml"
EXPERIMENT = ["--config", str(REPOSITORY / "train_config" / "esm2ae.yaml")]


def train_ray(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """The program, as a user starts it."""
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "train_ray.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )


@pytest.fixture
def called(tmp_path, monkeypatch, capsys) -> Callable[..., subprocess.CompletedProcess]:
    """Call ``esmeray`` in this process, which has loaded what it needs, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> subprocess.CompletedProcess:
        code = run(main, list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


def test_help_lists_every_setting(tmp_path):
    result = train_ray("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert [".".join(key) for key in known_keys() if f"--{'.'.join(key)}" not in result.stdout] == []
    assert "(default: 8192)" in result.stdout


def test_help_of_a_search_lists_its_settings_too(tmp_path):
    result = train_ray("--help", "--tune", str(SEARCH), cwd=tmp_path)
    assert result.returncode == 0
    keys = [".".join(key) for key in known_keys(TuneConfig)]
    assert [key for key in keys if f"--tune.{key}" not in result.stdout] == []
    assert "--batch.tokens" in result.stdout


def test_dry_run_prints_config_and_plan_and_starts_nothing(tmp_path):
    result = train_ray(*EXPERIMENT, "--dry-run", "--data.sample.records", "100", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "global_tokens: 8192" in result.stdout
    for line in ("workers", "training data", "tokens per step", "steps per epoch", "parameters", "memory a device"):
        assert line in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["tune"], ["train", "--tune", "train_config/tune_throughput.yaml"]])
def test_dry_run_of_a_search_prints_the_space_and_starts_nothing(called, tmp_path, command):
    options = ["--ray.address", "local", "--ray.num_workers", "1", "--tune.space.tokens", "4096", "8192"]
    result = called(*command, "--config", "train_config/masked_lm.yaml", "--dry-run", *options)
    assert result.returncode == 0, result.stderr
    for line in (
        "token budget          4,096, 8,192",
        "configurations        24",
        "at most 12 (tpe)",
        "first, if all fit",
    ):
        assert line in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--batch.tokns", "3"], 2, "did you mean --batch.tokens?"),
        (["--config"], 2, "--config: a value is missing; usage: "),
        (["--config", "none.yaml"], 2, "none.yaml: can't be read"),
        (["--tune"], 2, "--tune: a value is missing; usage: "),
        (["--tune", "none.yaml"], 2, "none.yaml: can't be read"),
        (["--tune.search.seed", "1"], 2, "--tune.search.seed: is of a search, and there is none: add --tune"),
        (["--tune", str(SEARCH), "--tune.search.sed", "1"], 2, "did you mean --tune.search.seed?"),
        (["--training.epochs", "3", "4"], 2, "unexpected argument 4"),
        (["--ray.address", "local", "--ray.num_workers", "500"], 4, "500 workers asked"),
        (["--data.source", "none.fasta"], 3, "none.fasta"),
        (["--run.resume", "must"], 6, "no such run"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_one_line_and_an_exit_code(arguments, code, message, called):
    result = called("train", *(arguments if "--config" in arguments else [*EXPERIMENT, *arguments]))
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "error: --config: no experiment is named; usage: python -m tools train --config FILE"),
        ("", "error: run.yaml: holds no settings"),
        ("{}\n", "error: run.yaml: holds no settings"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_no_experiment_trains_from_defaults_alone(text, message, dry, called, tmp_path):
    arguments = []
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
        arguments = ["--config", "run.yaml"]
    before = sorted(tmp_path.iterdir())
    result = called("train", *arguments, *dry)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_program_leaves_with_the_code_of_the_mistake(tmp_path):
    result = train_ray("--config", "none.yaml", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: none.yaml: can't be read")


def test_the_installed_command_is_the_same_program():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"esmeray": "tools.__main__:entry_point"}
    rooms = [f"{path.parent.name}*" for path in REPOSITORY.glob("*/__init__.py") if path.parent.name != "tests"]
    assert sorted(project["tool"]["setuptools"]["packages"]["find"]["include"]) == sorted(rooms)
    assert callable(entry_point)
