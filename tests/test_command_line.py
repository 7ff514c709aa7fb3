import re
import subprocess
import sys
import tomllib
from collections.abc import Callable

import pytest

from esmeray.common.command_line import run
from esmeray.tools.__main__ import ALONE, COMMANDS, entry_point, example, main, subcommands
from esmeray.tools.reference import command_schemas
from esmeray.train_config.section import sections_of, settings_of
from esmeray.training.config import Config
from esmeray.tuning.section import TuneConfig
from tests.conftest import REPOSITORY

SEARCH = "train_config/tune_throughput.yaml"
EXPERIMENT = ["--config", "esm2ae"]
SCHEMAS = command_schemas()


@pytest.fixture
def called(tmp_path, monkeypatch, capsys) -> Callable[..., subprocess.CompletedProcess]:
    """Call ``esmeray`` in this process, which has loaded what it needs, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> subprocess.CompletedProcess:
        try:
            code = run(main, list(arguments))
        except SystemExit as ended:  # how --help ends
            code = int(ended.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


def test_without_a_command_each_is_listed_with_an_example_on_one_screen(called):
    lines = called().stdout.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 120 for line in lines)
    assert [line.split()[0] for line in lines[1:-1:2]] == list(COMMANDS)
    assert [line.split()[:2] for line in lines[2:-1:2]] == [["esmeray", command] for command in COMMANDS]


def test_an_unknown_name_gets_a_suggestion(called):
    refused(called("trian"), 2, "there is no command 'trian' (did you mean train?)")
    refused(called("export"), 2, "there is no command 'export' (did you mean train export?)")
    refused(called("train", "run"), 2, "there is no subcommand 'run'")
    refused(called("data", "convrt"), 2, "there is no subcommand 'convrt' (did you mean convert?)")


def test_help_lists_every_setting_with_the_values_of_the_files(called):
    result = called("tune", "--help", *EXPERIMENT)
    assert result.returncode == 0
    keys = [".".join(key) for key in settings_of(Config)] + [f"tune.{'.'.join(key)}" for key in settings_of(TuneConfig)]
    assert [key for key in keys if f"--{key}" not in result.stdout] == []
    assert "(default: 2048)" in result.stdout  # batch.tokens of the file


def test_dry_run_prints_config_and_plan_and_starts_nothing(called, tmp_path):
    result = called("train", *EXPERIMENT, "--dry_run", "--data.sample.records", "100")
    assert result.returncode == 0, result.stderr
    assert "global_tokens: 8192" in result.stdout
    for line in ("workers", "training data", "tokens per step", "steps per epoch", "parameters", "memory a device"):
        assert line in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["tune"], ["tune", "--tune", SEARCH]])
def test_dry_run_of_a_search_prints_the_space_and_starts_nothing(called, tmp_path, command):
    options = ["--ray.address", "local", "--ray.num_workers", "1", "--tune.space.tokens", "4096", "8192"]
    result = called(*command, "--config", "masked_lm", "--dry_run", *options)
    assert result.returncode == 0, result.stderr
    for line in ("token budget          4,096, 8,192", "configurations        24", "at most 12 (tpe)"):
        assert line in result.stdout
    assert list(tmp_path.iterdir()) == []


def refused(result: subprocess.CompletedProcess, code: int, words: str) -> None:
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (code, "", 1), result.stderr
    assert result.stderr.startswith("error: ")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "error: missing: --config; for example: esmeray train --config"),
        (["--config", "none.yaml"], 2, "none.yaml: can't be read"),
        (["--config", "empty.yaml"], 2, "empty.yaml: holds no settings"),
        ([*EXPERIMENT, "--tune.search.seed", "1"], 2, "unknown option --tune.search.seed"),
        ([*EXPERIMENT, "--ray.address", "local", "--ray.num_workers", "500"], 4, "500 workers asked"),
        ([*EXPERIMENT, "--data.source", "none.fasta"], 3, "none.fasta"),
        ([*EXPERIMENT, "--run.resume", "must"], 6, "no such run"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_of_training_are_one_line_and_an_exit_code(arguments, code, message, called, tmp_path):
    (tmp_path / "empty.yaml").write_text("{}\n")
    refused(called("train", *arguments), code, message)
    assert code != 2 or [path.name for path in tmp_path.iterdir()] == ["empty.yaml"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_settings_are_described_sections_with_underscores(called, name):
    command, *words = name.split()
    assert (command in ALONE and not words) or words[0] in subcommands(command)
    options = re.findall(r"^  (--[\w.-]+)", called(*name.split(), "--help").stdout, re.MULTILINE)
    assert set(options) >= {f"--{'.'.join(key)}" for key in settings_of(SCHEMAS[name]) if len(key) > 1}
    assert [option for option in options if "-" in option.removeprefix("--")] == []
    assert all(section.__doc__ for section in sections_of(SCHEMAS[name]).values())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_and_a_command_without_what_it_needs_are_one_line(called, command):
    for tool in [[command, name] for name in subcommands(command)] or [[command]]:
        refused(called(*tool, "--hlep"), 2, "--hlep (did you mean --help?)")
    if command != "profile":
        refused(called(command), 2, "" if command in ALONE else f"; for example: {example(command)}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "error: missing: MODEL; for example: esmeray classify predict runs/locations "),
        ("model", "error: missing: --predict.input, --predict.output; for example: esmeray classify predict "),
        ("model b.fasta --predict.output b.csv", "unexpected argument b.fasta; for example: "),
        ("model --predict.output", "--predict.output: expected one argument"),
        ("model --predict.input a --predict.output b --predict.precision x", "should be 'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_a_wrong_argument_of_a_tool_is_named(called, arguments, words):
    refused(called("classify", "predict", *arguments.split()), 2, words)


def test_train_ray_and_the_installed_command_are_the_same_program(tmp_path):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"esmeray": f"{entry_point.__module__}:{entry_point.__name__}"}
    program = [sys.executable, str(REPOSITORY / "train_ray.py"), "--config", "none.yaml"]
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    refused(result, 2, "error: none.yaml: can't be read")
