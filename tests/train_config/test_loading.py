from itertools import pairwise
from pathlib import Path

import pytest

from esmeray.common import processor
from esmeray.common.command_line import run
from esmeray.common.errors import ConfigError
from esmeray.service.section import ServeSection, ServiceSettings
from esmeray.tools.grammar import read_words
from esmeray.tools.train import run as train
from esmeray.tools.tune import _search
from esmeray.train_config.loading import SHIPPED, dump_config, load_settings
from esmeray.train_config.section import FIXED, FREE, UNSEEN, ComputeSection, on_resume, with_absolute_paths
from esmeray.training.config import Config, load_config, with_precision
from esmeray.tuning.section import TuneConfig
from tests.runs import tiny_config


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def load(path: Path | None, *options: str) -> Config:
    return load_config(path, read_words(list(options), "train", None, train.Arguments)[1])


def load_search(path: Path | None, *options: str) -> TuneConfig:
    given = read_words(list(options), "tune", None, _search.Arguments)[1].items()
    return load_settings(TuneConfig, path, {key[1:]: value for key, value in given if key[0] == "tune"}, "tune.")


def test_command_line_overrides_file_and_file_overrides_default(file):
    path = file("batch:\n  tokens: 5000\n  global_tokens: 4096\n")
    config = load(path, "--batch.tokens", "4096")  # fixes the file's value
    assert (config.batch.tokens, config.batch.global_tokens) == (4096, 4096)
    assert config.batch.ramp_steps == Config().batch.ramp_steps
    path = file("search:\n  max_trials: 3\nspace:\n  num_workers: [4]\n  precision: fp32\n")
    search = load_search(path, "--tune.space.tokens", "512", "1024", "--tune.space.num_workers=2", "--tune.name", "a")
    assert (search.space.tokens, search.space.num_workers, search.name) == ([512, 1024], [2], "a")
    assert search.search.max_trials == 3 and search.space.precision == ["fp32"], "a single value is a list of one"


def test_none_clears_an_optional_setting_and_empties_a_list(file):
    labels = "data:\n  labels:\n    split: files\n    validation_source: [a.fasta]\n"
    path = file(f"training:\n  max_steps: 5\n{labels}")
    options = ["--training.max_steps", "null", "--data.labels.split", "hash", "--data.labels.validation_source", "none"]
    config = load(path, *options)
    assert (config.training.max_steps, config.data.labels.validation_source) == (None, [])
    with pytest.raises(ConfigError, match=r"^--data\.source: list should have at least 1 item"):
        load(path, *options, "--data.source", "none")


def test_weights_named_on_the_command_line_drop_the_sizes_of_the_file(file, tmp_path):
    (tmp_path / "weights").mkdir()
    path = file("model:\n  backbone:\n    source: esm2_t6_8M\n    layers: 2\n    hidden_size: 64\n    heads: 4\n")
    for source in ("facebook/esm2_t6_8M_UR50D", str(tmp_path / "weights")):
        backbone = load(path, "--model.backbone.source", source, "--model.backbone.heads", "8").model.backbone
        assert (backbone.source, backbone.layers, backbone.hidden_size, backbone.heads) == (source, None, None, 8)
    backbone = load(path, "--model.backbone.source", "bert").model.backbone  # a model type: weights are random
    assert (backbone.layers, backbone.hidden_size, backbone.heads) == (2, 64, 4)


def test_resolved_settings_read_back_the_same(file):
    config = load(None, "--training.betas", "0.8", "0.9")
    assert load(file(dump_config(config))) == config
    search = load_search(None, "--tune.space.tokens", "512", "--tune.search.time_budget_s", "60")
    assert load_search(file(dump_config(search))) == search


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch:\n  tokns: 3\n", r"run\.yaml:2: batch\.tokns: unknown setting \(did you mean batch\.tokens\?\)"),
        ("training:\n  learning_rate: fast\n", r"run\.yaml:2: training\.learning_rate: .*number.*'fast'"),
        ("batch:\n  tokens: 1\n  tokens: 2\n", r"run\.yaml:3: batch\.tokens is set twice, first on line 2"),
        ("batch: [1\n", r"run\.yaml:2: not valid YAML"),
        ("batch:\n", r"run\.yaml:1: batch: is empty: remove it, or add settings below it"),
        ("- a\n", r"run\.yaml: contains no settings; write them in sections"),
        (
            "data:\n  max_length: 9000\n",
            r"batch\.tokens \(8192\) is too small for one sequence of data\.max_length \(9000\)",
        ),
        ("batch:\n  tokens: 5000\n", r"global_tokens \(32768\) must be a multiple of tokens \(5000\); the nearest is"),
        ("run:\n  name: ../up\n", r"run\.yaml:2: run\.name: '\.\./up' is not a valid folder name: use letters"),
        ("batch:\n  tokens: 1000000000000\n", r"run\.yaml:2: batch\.tokens: .* less than or equal to 16777216"),
        ("space:\n  tokens: [512, 0]\n", r"run\.yaml:2: space\.tokens: .*greater than 0, got 0"),
        ("space:\n  workers: [2, 2]\n", r"run\.yaml:2: space\.workers: lists a value twice: 2, 2"),
        ("space: {}\nbatch:\n  tokens: 512\n", r"run\.yaml:2: batch: unknown setting"),
    ],
)
def test_mistakes_in_the_file_are_one_line_with_file_and_key(file, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        (load_search if "space:" in text else load)(file(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch.tokns", "4"], r"unknown option --batch\.tokns \(did you mean --batch\.tokens\?\)"),
        (["--data.source", "--batch.tokens", "3"], r"--data\.source: a value is missing"),
        (["--batch.tokens", "1", "2"], r"unexpected argument 2; for example: "),
        (["--batch.tokens", "x"], r"^--batch\.tokens: .*integer.*'x'"),
        (["--tune.space.workers", "0"], r"^--tune\.space\.workers: .*greater than 0, got '0'"),
        (["--training.precision", "fp8"], r"^--training\.precision: .*'fp32', 'bf16' or 'fp16'"),
        (
            ["--batch.tokens", "4", "--data.max_length", "9000"],
            r"^--data\.max_length --batch\.tokens: batch\.tokens \(4\) is too small",
        ),
        (["--training.eps", "1e-6"], r"unknown option --training\.eps: was removed; its value is now 1e-08"),
    ],
)
def test_mistakes_on_the_command_line_name_the_option(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_search(None, *options) and load(None, *options)
    assert "\n" not in str(caught.value)


def test_every_mistake_is_a_line_of_its_own(file, capsys):
    path = file("batch:\n  tokens: abc\ntraining:\n  learning_rate: fast\n")
    assert run(lambda _: load(path) and 0, []) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {path}:2: batch.tokens: ")
    assert second.startswith(f"error: {path}:4: training.learning_rate: ")


def test_shipped_files_are_found_from_any_folder_and_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in SHIPPED.glob("*.yaml"):
        if path.name != "serve.yaml" and not path.name.startswith("tune_"):
            assert load_config(f"train_config/{path.name}") == load_config(path.stem)
    assert load_settings(TuneConfig, "train_config/tune_throughput.yaml") == TuneConfig()
    assert load_settings(TuneConfig, "tune_tokens").space.num_workers is None
    assert load_settings(ServiceSettings, "train_config/serve.yaml").serve.models[0].random_weights
    with pytest.raises(ConfigError, match=r"esm2a\.yaml: can't be read .*\(did you mean esm2ae\?\); .*train_config"):
        load_config("train_config/esm2a.yaml")


def test_precision_is_by_default_that_of_the_hardware(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "has_gpu_driver", lambda: True)  # a machine with a driver that computes on the CPU
    for flags, on_cuda, precision in [
        ("avx2 avx512f", False, "fp32"),
        ("avx2 avx512f", True, "bf16"),
        ("amx_bf16", False, "bf16"),
        ("avx512_bf16", False, "bf16"),
    ]:
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
        assert processor.default_precision(on_cuda) == precision
        assert ComputeSection().resolved(on_cuda).precision == precision
        for given in ("bf16", "fp32", "fp16"):
            assert ComputeSection(precision=given).resolved(on_cuda).precision == given
    for options in ([], ["--training.learning_rate", "0.1"], ["--ray.address", "head:6379"]):
        assert with_precision(load(None, *options), "fp32").training.precision == "fp32"
    assert with_precision(load(None, "--training.precision", "bf16"), "fp32").training.precision == "bf16"


LISTS = "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvw"))
MERGES = "".join(f"{b}: &{b} {{<<: [*{a}, *{a}, *{a}, *{a}]}}\n" for a, b in pairwise("abcdefghijk"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: " + "[" * 5_000 + "]" * 5_000, "100 levels"),
        ("a: &a [0, 0]\n" + LISTS, "100,000"),
        ("a: &a {x: 1}\n" + MERGES, "100"),
        ("a: &a {b: *a}\n", "an alias inside its own anchor"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 2026-99-99", "month"),
        ("? [a, b]\n: 1\n", "unhashable"),
    ],
)
def test_yaml_that_means_harm_is_refused_in_one_line(tmp_path, text, problem):
    (tmp_path / "in.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"not valid YAML .*{problem}") as raised:
        load_config(tmp_path / "in.yaml")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_settings_have_the_nature_of_their_section_or_their_own():
    keys = "model.backbone.heads", "model.backbone.gradient_checkpointing", "wandb.mode", "training.learning_rate"
    assert [on_resume(Config, key) for key in keys] == [FIXED, UNSEEN, UNSEEN, FREE]


def test_paths_become_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    config = tiny_config(tmp_path, data={"stage_dir": "fast"}, model={"backbone": {"source": "weights"}})
    absolute = with_absolute_paths(config)
    assert absolute.data.stage_dir == str(tmp_path / "fast")
    assert absolute.model.backbone.source == str(tmp_path / "weights")
    assert with_absolute_paths(Config()).model.backbone.source == Config().model.backbone.source


def test_links_to_keys_of_the_service_stay_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "..2026_11_25").mkdir()
    (tmp_path / "keys.yaml").symlink_to("..2026_11_25/keys.yaml")
    settings = {"models": ["weights"], "access": {"keys": "keys.yaml"}}
    assert with_absolute_paths(ServeSection.model_validate(settings)).access.keys == str(tmp_path / "keys.yaml")
