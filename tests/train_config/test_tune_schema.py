from pathlib import Path

import pytest

from common.errors import ConfigError
from train_config.loading import dump_config, known_keys, load_config, load_tune_config, split_overrides
from train_config.tune_schema import TuneConfig

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "train_config" / "tune_throughput.yaml"


@pytest.fixture
def search_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "search.yaml"
        path.write_text(text)
        return path

    return write


def test_shipped_search_says_the_defaults():
    assert load_tune_config(SHIPPED) == TuneConfig()


def test_options_of_a_search_go_before_its_file(search_file):
    path = search_file("search:\n  seed: 3\nspace:\n  num_workers: [4]\n")
    options = ["--tune.space.tokens", "512", "1024", "--tune.space.num_workers=2", "--tune.space.compile", "true"]
    search = load_tune_config(path, [*options, "--tune.name", "mine", "--tune.space.stage", "0", "2"])
    assert (search.space.tokens, search.space.num_workers, search.space.compile) == ([512, 1024], [2], [True])
    assert (search.name, search.search.seed, search.space.stage) == ("mine", 3, [0, 2])


def test_none_is_a_precision_and_null_keeps_that_of_the_experiment():
    assert load_tune_config(None, ["--tune.space.amp_dtype", "none"]).space.amp_dtype == ["none"]
    assert load_tune_config(None, ["--tune.space.amp_dtype", "null"]).space.amp_dtype is None
    assert load_tune_config(None, ["--tune.space.num_workers", "none"]).space.num_workers is None


def test_options_of_both_are_told_apart_with_their_values():
    experiment, search = split_overrides(
        ["--data.source", "a", "b", "--tune.space.tokens", "512", "1024", "--batch.tokens=2048"]
    )
    assert experiment == ["--data.source", "a", "b", "--batch.tokens=2048"]
    assert search == ["--tune.space.tokens", "512", "1024"]


def test_resolved_search_reads_back_the_same(search_file):
    search = load_tune_config(None, ["--tune.space.tokens", "512", "--tune.search.time_budget_s", "60"])
    assert load_tune_config(search_file(dump_config(search))) == search


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("space:\n  token: [3]\n", r"search\.yaml:2: space\.token: no such setting; did you mean space\.tokens\?"),
        ("space:\n  tokens: [512, 0]\n", r"search\.yaml:2: space\.tokens: .*greater than 0, got 0"),
        ("space:\n  tokens: []\n", r"search\.yaml:2: space\.tokens: has no value"),
        ("space:\n  stage: [2, 2]\n", r"search\.yaml:2: space\.stage: names a value twice: 2, 2"),
        ("search:\n  algorithm: tpo\n", r"search\.yaml:2: search\.algorithm: .*'tpe', 'random' or 'grid'"),
        ("memory_margin: 1.0\n", r"search\.yaml:1: memory_margin: .*less than 1, got 1\.0"),
        ("search: {}\nbatch:\n  tokens: 512\n", r"search\.yaml:2: batch: no such setting"),
        ("batch:\n  tokens: 512\n", r"search\.yaml: this looks like an experiment, which belongs to --config"),
        ("space:\n", r"search\.yaml:1: space: is empty: leave it out or name settings below it"),
    ],
)
def test_mistakes_in_the_file_are_one_line_with_file_and_key(search_file, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_tune_config(search_file(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune.space.tokns", "4"], r"--tune\.space\.tokns: no such setting; did you mean tune\.space\.tokens\?"),
        (["--tune.space.tokens"], r"--tune\.space\.tokens: a value is missing"),
        (["--tune.space.stage", "5"], r"--tune\.space\.stage: .*less than or equal to 3, got '5'"),
        (["--tune.search.seed", "1", "2"], r"--tune\.search\.seed: takes one value, 2 given"),
    ],
)
def test_mistakes_on_the_command_line_name_the_option(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_tune_config(None, arguments)
    assert "\n" not in str(caught.value)


def test_experiments_do_not_take_settings_of_a_search():
    with pytest.raises(ConfigError, match="no such setting"):
        load_config(None, ["--space.tokens", "512"])


def test_every_setting_says_what_it_is():
    for key in known_keys(TuneConfig):
        model = TuneConfig
        for part in key[:-1]:
            model = model.model_fields[part].annotation
        assert model.model_fields[key[-1]].description, key


def test_search_may_not_take_the_folder_of_the_stores():
    with pytest.raises(ConfigError, match=r"name.*'stores' is the folder of the stores"):
        load_tune_config(SHIPPED, ["--tune.name", "stores"])
