"""Layers are computed in one pass, chosen by records that the scores do not include, and cut to the same vectors."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import esmeray
from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.labels.labelled_file import read_labelled
from esmeray.dataset.section import IngestSection, LabelsSection, TokenizerSection
from esmeray.inference.layers import FOLDS, rows_of, score_layers, write_cut
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.source import find_model
from tests.dataset.tokenizer_folders import esm, esmc, prot_bert, prot_t5
from tests.model.small_models import save_masked_lm, save_small_model

pytestmark = pytest.mark.slow
RANDOM = np.random.default_rng(0)
TEXTS = ["".join(RANDOM.choice([*AMINO_ACIDS], 16)) for _ in range(80)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = esm(tmp_path_factory.mktemp("layers") / "esm")
    save_masked_lm(folder, "esm", num_hidden_layers=2)
    return folder


@pytest.mark.parametrize("kind", ["esm", "bert", "t5"])
def test_a_cut_model_has_the_bytes_of_the_layer(kind: str, tmp_path: Path):
    folder = {"esm": esm, "bert": prot_bert, "t5": prot_t5}[kind](tmp_path / kind)
    save_small_model(folder, kind, num_hidden_layers=3)
    whole = open_model(folder, device="cpu")
    for layer in (1, 2, 3):
        write_cut(find_model(folder), layer, tmp_path / f"cut{layer}")
        cut = open_model(tmp_path / f"cut{layer}", device="cpu")
        assert cut.facts.num_layers == layer
        np.testing.assert_array_equal(cut.embed(TEXTS[:5]), whole.embed(TEXTS[:5], layer=layer))
        assert "logits" not in {output.name for output in cut.outputs()}


def test_a_model_whose_layers_depend_on_their_number_is_not_cut(tmp_path: Path):
    save_small_model(esmc(tmp_path / "esmc"), "esmc", num_hidden_layers=6)
    table = labelled(tmp_path, ["with" if "K" in text else "without" for text in TEXTS])
    with pytest.raises(ConfigError, match="can't be cut"):
        esmeray.choose_layer(tmp_path / "esmc", table, device="cpu", output=tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


def labelled(folder: Path, labels: object, **columns: object) -> Path:
    pd.DataFrame({"sequence": TEXTS, "label": labels, **columns}).to_csv(folder / "labelled.csv", index=False)
    return folder / "labelled.csv"


def test_every_kind_of_label_has_its_probe(model: Path, tmp_path: Path):
    share = [text.count("K") / len(text) for text in TEXTS]
    helices = ["".join("H" if letter in "AEKLMQR" else "C" for letter in text) for text in TEXTS]
    names = ["high" if value > np.median(share) else "low" for value in share]
    for kind, labels, metric, least in (
        ("regression", share, "spearman", 0.8),
        ("multiclass", names, "accuracy", 0.7),
        ("per_residue", helices, "accuracy", 0.9),
    ):
        config = {"data.labels.kind": kind}
        table = esmeray.choose_layer(model, labelled(tmp_path, labels), device="cpu", config=config).table
        assert table.index.tolist() == [0, 1, 2, "chosen"] and table.loc["chosen", metric] > least, kind
        assert (table["low"] <= table[metric]).all() and (table[metric] <= table["high"]).all()
    for refused in ({"data.labels.kind": "multilabel"}, {"data.labels.split": "clusters"}):
        with pytest.raises(ConfigError, match="labels must be in one column"):
            esmeray.choose_layer(model, tmp_path / "labelled.csv", config=refused)


def test_the_command_writes_the_table_the_picture_and_a_model_that_opens(command, model: Path, tmp_path: Path):
    table = labelled(tmp_path, ["with" if "K" in text else "without" for text in TEXTS], part=["train", "test"] * 40)
    words = f"--layers.input {table} --layers.report {tmp_path}/report --layers.output {tmp_path}/cut "
    words += "--data.labels.split column --data.labels.split_column part --layers.device cpu"
    done = command.done(f"embed layers {model} {words}")
    rows = pd.read_csv(tmp_path / "report" / "layers.csv")
    assert f"layer {rows['inner'][1:].idxmax()} is chosen" in done.out and rows["layer"].iloc[-1] == "chosen"
    assert (tmp_path / "report" / "layers.png").is_file() and open_model(tmp_path / "cut").facts.task is None
    refused = command(f"embed layers {model} {words}")
    assert refused.code == 2 and "already exists" in refused.err


def test_a_layer_that_separates_classes_is_chosen_and_groups_are_not_split():
    classes = np.arange(100) % 2
    noise = RANDOM.normal(size=(3, 100, 4)).astype(np.float32)
    noise[1, :, 0] += 8 * classes
    groups = RANDOM.permutation(100)
    rows = pd.DataFrame({"target": classes, "record": np.arange(100), "group": groups, "fold": groups % FOLDS})
    for retrieval in (False, True):
        layer, table = score_layers([*noise], rows, retrieval, 0, print)
        assert layer == 1 and table.loc["chosen", "accuracy"] > 0.9
    with pytest.raises(DataError, match="distinct sequences"):
        score_layers([*noise], rows.assign(group=0), False, 0, print)
    with pytest.raises(DataError, match="held-out"):
        score_layers([*noise], rows.assign(fold=-1), False, 0, print)


def test_equal_sequences_and_groups_are_in_one_fold(model: Path, tmp_path: Path):
    table = labelled(tmp_path, ["one", "two"] * 40, family=[f"family{number % 30}" for number in range(80)])
    opened = open_model(model, device="cpu", heads=[])
    for column, groups in ((None, 80), ("family", 30)):
        labels = LabelsSection(group_column=column)
        records = read_labelled([str(table)], labels, TokenizerSection(), IngestSection())
        rows = rows_of(records, labels, opened, seed=0)
        assert rows["group"].nunique() == groups and set(rows["fold"]) == set(range(FOLDS))
        assert (rows.groupby("group")["fold"].nunique() == 1).all()
