import subprocess
import sys
import tomllib

import pytest

from esmeray import __version__
from esmeray.tools.__main__ import ALONE, COMMANDS, entry_point, example, subcommands
from esmeray.train_config.section import settings_of
from esmeray.training.config import Config
from esmeray.tuning.section import TuneConfig
from tests.conftest import REPOSITORY


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    """An empty folder, and a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_without_a_command_each_is_listed_with_an_example_on_one_screen(command):
    lines = command().out.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 120 for line in lines)
    assert [line.split()[0] for line in lines[1:-1:2]] == list(COMMANDS)
    assert [line.split()[:2] for line in lines[2:-1:2]] == [["esmeray", command] for command in COMMANDS]
    assert command("--version").out == f"esmeray {__version__}\n"


def test_an_unknown_name_gets_a_suggestion(command):
    command.refused(2, "unknown command 'trian' (did you mean train?)", "trian")
    command.refused(2, "unknown command 'export' (did you mean train export?)", "export")
    command.refused(2, "unknown subcommand 'run'", "train run")
    command.refused(2, "unknown subcommand 'convrt' (did you mean convert?)", "data convrt")


def test_help_lists_every_setting_with_the_values_of_the_files(command):
    text = command.done("tune --help --config esm2ae").out
    keys = [".".join(key) for key in settings_of(Config)] + [f"tune.{'.'.join(key)}" for key in settings_of(TuneConfig)]
    assert [key for key in keys if f"--{key}" not in text] == []
    assert "(default: 2048)" in text  # batch.tokens from the file


def test_dry_run_of_a_search_prints_the_space_and_starts_nothing(command, tmp_path):
    options = "--config masked_lm --dry_run --ray.address local --ray.num_workers 1 --tune.space.tokens 4096 8192"
    text = command.done(f"tune --tune train_config/tune_throughput.yaml {options}").out
    for line in ("token budget          4,096, 8,192", "configurations        12", "at most 12"):
        assert line in text
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_training_are_one_line_and_an_exit_code(command, tmp_path):
    for arguments, code, message in [
        ("", 2, "error: missing: --config; for example: esmeray train --config"),
        ("--config none.yaml", 2, "none.yaml: can't be read"),
        ("--config esm2ae --tune.search.max_trials 1", 2, "unknown option --tune.search.max_trials"),
        ("--config esm2ae --ray.address local --ray.num_workers 500", 4, "500 workers with"),
        ("--config esm2ae --data.source none.fasta", 3, "none.fasta"),
        ("--config esm2ae --run.resume must", 6, "run not found, but"),
    ]:
        outcome = command.refused(code, message, f"train {arguments}")
        assert outcome.out == "" and outcome.err.startswith("error: ")
        assert code != 2 or not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line(command, name):
    for tool in [f"{name} {subcommand}" for subcommand in subcommands(name)] or [name]:
        command.refused(2, "--hlep (did you mean --help?)", f"{tool} --hlep")
    if name != "profile":
        command.refused(2, "" if name in ALONE else f"; for example: {example(name)}", name)


def test_a_wrong_argument_of_a_tool_is_named(command):
    for arguments, words in [
        ("", "error: missing: MODEL; for example: esmeray classify predict runs/locations "),
        ("model", "error: missing: --predict.input, --predict.output; for example: esmeray classify predict "),
        ("model b.fasta --predict.output b.csv", "unexpected argument b.fasta; for example: "),
        ("model --predict.output", "--predict.output: expected one argument"),
    ]:
        command.refused(2, words, f"classify predict {arguments}")


def test_train_ray_and_the_installed_command_are_the_same_program(tmp_path):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"esmeray": f"{entry_point.__module__}:{entry_point.__name__}"}
    program = [sys.executable, str(REPOSITORY / "train_ray.py"), "--config", "none.yaml"]
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: none.yaml: can't be read")
