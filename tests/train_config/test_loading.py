import copy
from pathlib import Path

import pytest

from common.command_line import run
from common.errors import ConfigError
from train_config import processor
from train_config.loading import dump_config, known_keys, load_config, load_tune_config
from train_config.reference import config_reference
from train_config.schema import Config

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_command_line_goes_before_file_before_default(config_file):
    path = config_file("batch:\n  tokens: 4096\n  global_tokens: 8192\n")
    config = load_config(path, ["--batch.global_tokens", "4096"])
    assert config.batch.tokens == 4096
    assert config.batch.global_tokens == 4096
    assert config.batch.packing_window == Config().batch.packing_window


def test_options_take_hyphens_equals_signs_and_lists():
    config = load_config(
        None, ["--data.num-workers=3", "--data.source", "a.fasta", "b.fasta", "--ray.num_workers", "auto"]
    )
    assert (config.data.num_workers, config.data.source, config.ray.num_workers) == (3, ["a.fasta", "b.fasta"], "auto")


def test_none_clears_an_optional_setting(config_file):
    path = config_file("training:\n  max_steps: 5\n")
    assert load_config(path, ["--training.max_steps", "none"]).training.max_steps is None


@pytest.mark.parametrize("word", ["none", "null"])
def test_none_empties_a_list(config_file, word):
    path = config_file("data:\n  labels:\n    split: files\n    validation_source: [a.fasta]\n")
    options = ["--data.labels.split", "hash", "--data.labels.validation_source", word]
    assert load_config(path, options).data.labels.validation_source == []
    with pytest.raises(ConfigError, match=r"^--data\.source: list should have at least 1 item"):
        load_config(path, [*options, "--data.source", word])


def test_a_single_value_in_a_file_is_a_list_of_one(config_file):
    path = config_file("data:\n  source: a.fasta\nmodel:\n  autoencoder:\n    hidden_sizes: 64\n")
    config = load_config(path)
    assert (config.data.source, config.model.autoencoder.hidden_sizes) == (["a.fasta"], [64])
    search = load_tune_config(config_file("space:\n  tokens: 4096\n  amp_dtype: none\n"))
    assert (search.space.tokens, search.space.amp_dtype) == ([4096], ["none"])


SIZES = "model:\n  backbone:\n    source: esm2_t6_8M\n    layers: 2\n    hidden_size: 64\n    heads: 4\n"


@pytest.mark.parametrize("source", ["facebook/esm2_t6_8M_UR50D", "folder"])
def test_weights_named_on_the_command_line_drop_the_sizes_of_the_file(config_file, tmp_path, source, capsys):
    if source == "folder":
        (tmp_path / "weights").mkdir()
        source = str(tmp_path / "weights")
    path = config_file(SIZES)
    backbone = load_config(path, ["--model.backbone.source", source, "--model.backbone.heads", "8"]).model.backbone
    assert (backbone.source, backbone.layers, backbone.hidden_size, backbone.heads) == (source, None, None, 8)
    assert capsys.readouterr().err == (
        f"warning: {path}: layers, hidden_size of model.backbone not used: the weights of {source} have their own\n"
    )


@pytest.mark.parametrize("options", [[], ["--model.backbone.source", "bert"], ["--run.name", "other"]])
def test_sizes_of_random_weights_stay(config_file, options, capsys):
    backbone = load_config(config_file(SIZES), options).model.backbone
    assert (backbone.layers, backbone.hidden_size, backbone.heads) == (2, 64, 4)
    assert capsys.readouterr().err == ""


def test_resolved_config_reads_back_the_same(config_file):
    config = load_config(None, ["--training.betas", "0.8", "0.9"])
    assert load_config(config_file(dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch:\n  tokns: 3\n", r"run\.yaml:2: batch\.tokns: no such setting; did you mean batch\.tokens\?"),
        ("training:\n  learning_rate: fast\n", r"run\.yaml:2: training\.learning_rate: .*number.*'fast'"),
        ("batch:\n  tokens: 1\n  tokens: 2\n", r"run\.yaml:3: batch\.tokens is set twice, first in line 2"),
        ("batch: [1\n", r"run\.yaml:2: no valid YAML"),
        ("batch:\n", r"run\.yaml:1: batch: is empty: leave it out or name settings below it"),
        ("model:\n  backbone:\n", r"run\.yaml:2: model\.backbone: is empty: leave it out or"),
        ("space: {}\n", r"run\.yaml: this looks like a search, which belongs to --tune"),
        ("- a\n", r"run\.yaml: must hold sections"),
        ("data:\n  max_length: 9000\n", r"batch\.tokens \(8192\) can't hold one sequence of data\.max_length \(9000\)"),
        ("batch:\n  tokens: 5000\n", r"global_tokens \(32768\) must be a multiple of tokens \(5000\); the nearest is"),
        ("data:\n  source: []\n", r"run\.yaml:2: data\.source"),
        ("run:\n  name: ../up\n", r"run\.yaml:2: run\.name: '\.\./up' is no name of a folder: use letters"),
        ("run:\n  name: my run\n", r"run\.yaml:2: run\.name: 'my run' is no name of a folder: use letters"),
        ("", r"run\.yaml: holds no settings"),
        ("batch:\n  tokens: 1000000000000\n", r"run\.yaml:2: batch\.tokens: .* less than or equal to 16777216"),
        ("run:\n  storage_path: s3://bucket\n", r"run\.yaml:2: run\.storage_path: must be a folder"),
    ],
)
def test_mistakes_in_the_file_are_one_line_with_file_and_key(config_file, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(config_file(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch.tokns", "4"], r"--batch\.tokns: no such setting; did you mean batch\.tokens\?"),
        (["--batch.tokens"], r"--batch\.tokens: a value is missing"),
        (["--batch.tokens", "1", "2"], r"--batch\.tokens: takes one value, 2 given"),
        (["--batch.tokens", "x"], r"--batch\.tokens: .*integer.*'x'"),
        (["--training.amp_dtype", "fp8"], r"--training\.amp_dtype: .*'bf16', 'fp16' or 'none'"),
        (["--batch", "3"], r"--batch: no such setting"),
        (["--ray.dashboard_port", "99999"], r"^--ray\.dashboard_port: .* less than or equal to 65535, got '99999'"),
        (
            ["--training.deterministic", "true", "--training.cudnn_benchmark", "true"],
            r"^--training\.deterministic --training\.cudnn_benchmark: cudnn_benchmark chooses",
        ),
        (["stray"], r"stray: expected an option"),
    ],
)
def test_mistakes_on_the_command_line_name_the_option(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            "training:\n  deterministic: true\n",
            ["--training.cudnn_benchmark", "true", "--training.epochs", "3"],
            r"^--training\.cudnn_benchmark: cudnn_benchmark chooses kernels by timing them",
        ),
        (
            "data:\n  labels:\n    split: files\n    validation_source: [a.csv]\n",
            ["--data.labels.split", "stratified", "--data.source", "b.csv"],
            r"^--data\.labels\.split: split files and validation_source go together",
        ),
        (
            "batch:\n  tokens: 4096\n",
            ["--data.max_length", "9000"],
            r"^--data\.max_length: batch\.tokens \(4096\) can't",
        ),
    ],
)
def test_a_rule_that_an_override_breaks_names_the_override(config_file, text, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file(text), arguments)


def test_every_mistake_is_a_line_of_its_own(config_file, capsys):
    path = config_file("batch:\n  tokens: abc\ntraining:\n  learning_rate: fast\n")
    assert run(lambda _: load_config(path) and 0, []) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {path}:2: batch.tokens: ")
    assert second.startswith(f"error: {path}:4: training.learning_rate: ")


def test_mistakes_keep_apart_in_a_copy():
    error = copy.copy(ConfigError("one", "two"))  # as pickle does it
    assert (error.problems, str(error)) == (("one", "two"), "one; two")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "none.yaml")


def test_every_setting_says_what_it_is():
    for key in known_keys():
        model = Config
        for part in key[:-1]:
            model = model.model_fields[part].annotation
        assert model.model_fields[key[-1]].description, key


@pytest.mark.parametrize("path", sorted((REPOSITORY / "train_config").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_experiments_are_valid(path):
    if path.name not in ("zero2.yaml", "tune_throughput.yaml"):
        load_config(path)


def test_config_page_is_up_to_date():
    page = (REPOSITORY / "docs" / "config.md").read_text()
    assert page == config_reference(), "run 'make docs'"
    assert all(f"`{key[-1]}`" in page for key in known_keys())


def test_run_may_not_take_the_folder_of_the_stores():
    with pytest.raises(ConfigError, match=r"run\.name.*'stores' is the folder of the stores"):
        load_config(None, ["--run.name", "stores"])


@pytest.mark.parametrize(
    ("flags", "arguments", "amp_dtype"),
    [
        ("sse4_1 avx2", [], "none"),
        ("avx2 avx512f", [], "none"),
        ("avx512_bf16", [], "bf16"),
        ("amx_bf16", [], "bf16"),
        ("avx2", ["--training.amp_dtype", "bf16"], "bf16"),
        ("avx2", ["--ray.address", "head:6379"], "bf16"),
    ],
)
def test_precision_is_fp32_by_default_where_the_processor_has_no_bf16(
    tmp_path, monkeypatch, flags, arguments, amp_dtype
):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "has_gpu_driver", lambda: False)
    assert load_config(None, arguments).training.amp_dtype == amp_dtype
