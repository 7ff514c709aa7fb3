"""Layers are computed in one pass, chosen by records that the scores do not include, and cut to the same vectors."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import esmeray
from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.layers.calls import told_kind
from esmeray.inference.layers.cutting import write_cut
from esmeray.inference.layers.probes import score_layers
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


@pytest.mark.parametrize("kind", ["esm", "esmc", "bert", "t5"])
def test_a_cut_model_has_the_bytes_of_the_layer(kind: str, tmp_path: Path):
    folder = {"esm": esm, "esmc": esmc, "bert": prot_bert, "t5": prot_t5}[kind](tmp_path / kind)
    save_small_model(folder, kind, num_hidden_layers=3)
    whole = open_model(folder, device="cpu")
    for layer in (1, 2, 3):
        write_cut(find_model(folder), layer, tmp_path / f"cut{layer}")
        cut = open_model(tmp_path / f"cut{layer}", device="cpu")
        assert cut.facts.num_layers == layer
        np.testing.assert_array_equal(cut.embed(TEXTS[:5]), whole.embed(TEXTS[:5], layer=layer))
        assert "logits" not in {output.name for output in cut.outputs()}


def labelled(folder: Path, labels: object, **columns: object) -> Path:
    pd.DataFrame({"sequence": TEXTS, "label": labels, **columns}).to_csv(folder / "labelled.csv", index=False)
    return folder / "labelled.csv"


def test_the_labels_tell_the_task(model: Path, tmp_path: Path):
    share = [text.count("K") / len(text) for text in TEXTS]
    helices = ["".join("H" if letter in "AEKLMQR" else "C" for letter in text) for text in TEXTS]
    names = ["high" if value > np.median(share) else "low" for value in share]
    for labels, metric, least in ((share, "spearman", 0.8), (names, "accuracy", 0.7), (helices, "accuracy", 0.9)):
        choice = esmeray.choose_layer(model, labelled(tmp_path, labels), device="cpu")
        assert choice.metric == metric and choice.score[0] > least, labels[:2]
        assert choice.score[1] <= choice.score[0] <= choice.score[2]
        assert choice.table["layer"].tolist() == [0, 1, 2]
    for labels in ([*range(8)] * 10, TEXTS, [0, 1] * 40):
        with pytest.raises(ConfigError, match=r"data.labels.kind"):
            told_kind([str(label) for label in labels], ["MK"] * 80)


def test_the_command_writes_the_table_the_picture_and_a_model_that_opens(command, model: Path, tmp_path: Path):
    table = labelled(tmp_path, ["with" if "K" in text else "without" for text in TEXTS], part=["train", "test"] * 40)
    words = f"--layers.input {table} --layers.report {tmp_path}/report --layers.output {tmp_path}/cut "
    words += "--data.labels.split column --data.labels.split_column part --layers.device cpu"
    done = command.done(f"embed layers {model} {words}")
    rows = pd.read_csv(tmp_path / "report" / "layers.csv")
    assert f"layer {rows['inner'][1:].idxmax()} is chosen" in done.out
    assert (tmp_path / "report" / "layers.png").is_file() and open_model(tmp_path / "cut").facts.task is None
    refused = command(f"embed layers {model} {words}")
    assert refused.code == 2 and "already exists" in refused.err


def test_a_layer_that_separates_classes_is_chosen_and_groups_are_not_split():
    classes = np.arange(100) % 2
    noise = RANDOM.normal(size=(3, 100, 4)).astype(np.float32)
    noise[1, :, 0] += 8 * classes
    rows = pd.DataFrame({"target": classes, "record": np.arange(100), "offset": 0, "group": np.arange(100)})
    for retrieval in (False, True):
        layer, metric, score, _ = score_layers([*noise], rows, retrieval, 0)
        assert (layer, metric) == (1, "accuracy") and score[0] > 0.9
    # Vectors that only tell the group: a probe learns nothing about the class of another group.
    of_groups = np.eye(30, dtype=np.float32)[np.arange(100) % 30]
    grouped = rows.assign(group=np.arange(100) % 30, target=(np.arange(100) % 30 * 7) % 2)
    assert score_layers([of_groups], grouped, False, 0)[2][0] < 0.7
    with pytest.raises(DataError, match="too few"):
        score_layers([*noise], rows.assign(group=0), False, 0)
