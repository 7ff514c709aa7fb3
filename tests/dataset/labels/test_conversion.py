"""A labelled store returns the content of its files, follows the split settings, and is written once and completely."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.batches.random_bits import split_records
from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.labelled_file import read_labelled
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.section import DataSection, IngestSection, LabelsSection, TokenizerSection
from tests.damage import flipped
from tests.dataset.labels.test_labelled_file import LOCATION
from tests.dataset.stores import PROTEINS, TEXT, data_of, made, proteins, write_table
from tests.model.support import random_sequences


def refusal(data: DataSection, root: Path) -> str:
    with pytest.raises((ConfigError, DataError)) as raised:
        made(data, root / "stores")
    assert "\n" not in str(raised.value)
    assert not list((root / "stores").glob("*")), "nothing was left behind"
    return str(raised.value).replace(f"{root}/", "")


def test_real_proteins_split_by_files_leave_out_unseen_classes(tmp_path, shared_data):
    training, held_out = (shared_data / f"deeploc_{part}.fasta.gz" for part in ("train", "valid"))
    labels = {"header_pattern": LOCATION, "split": "files", "validation_source": [str(held_out)]}
    message = refusal(data_of(training, **labels), tmp_path)
    assert "the label 'Cytoplasm-Nucleus' occurs only in held-out records" in message
    assert f"({held_out}, line " in message

    labelled = made(data_of(training, **labels, unseen_labels="skip"), tmp_path)
    counts = labelled.counts
    assert (counts.training, counts.validation, counts.records_unseen_label) == (2768, 1678 - 23, 23)
    assert labelled.training.tolist() == list(range(2768)) and len(labelled) == 2768 + 1678
    direct = read_labelled(
        [str(training), str(held_out)], LabelsSection(header_field=1), TokenizerSection(), IngestSection()
    )
    some = [*labelled.training[::97], *labelled.validation[::97]]
    assert [labelled.store.text(index) for index in some] == [direct.texts[index] for index in some]
    names = [labelled.label_space.names[target] for target in labelled.targets[some]]
    assert names == [direct.labels[index].rpartition("-")[0] for index in some]


def test_a_hash_splits_sequences_and_a_column_splits_in_three(tmp_path, table):
    labelled = made(data_of(table, share=0.4), tmp_path)
    training, validation = split_records(labelled.store.sequence_hashes, 0.4)
    assert (labelled.training.tolist(), labelled.validation.tolist()) == (training.tolist(), validation.tolist())
    assert labelled.training.dtype == np.int64 and labelled.test.size == 0
    assert (labelled.counts.training, labelled.manifest.counts.validation) == (training.size, validation.size)
    parts = ["test", "train", "Valid", "training", " test "]
    rows = [*zip(PROTEINS, "xyxxy", parts, strict=False)]
    path = write_table(tmp_path / "in.csv", ("sequence", "label", "part"), *rows, ("MKV", "y", "dev"))
    labelled = made(data_of(path, split="column", split_column="part"), tmp_path)
    held_out = labelled.validation.tolist(), labelled.test.tolist()
    assert (labelled.training.tolist(), held_out) == ([1, 3], ([2, 5], [0, 4]))
    assert (len(labelled), labelled.weights, labelled.counts.held_out_also_in_training) == (6, None, 1)


@pytest.mark.parametrize(
    ("kind", "columns", "rows", "targets"),
    [
        ("binary", ["a"], [("no",), ("yes",), ("no",)], [0, 1, 0]),
        ("multilabel", ["a"], [("p;q",), ("q",), ("r;p",)], [[1, 1, 0], [0, 1, 0], [1, 0, 1]]),
        ("multilabel", ["b", "a"], [(0, 1), (1, 1), (0, 0)], [[1, 0], [1, 1], [0, 0]]),
        ("regression", ["b", "a"], [(0.5, 1), (-1, 2), (0, 3)], [[1, 0.5], [2, -1], [3, 0]]),
        ("per_residue", ["a"], [("HE",), ("H.C",), ("EEE",)], [2, 1, 2, -100, 0, 1, 1, 1]),
    ],
)
def test_targets_of_every_kind_come_back(tmp_path, kind, columns, rows, targets):
    header = ("sequence", *sorted(columns))
    path = write_table(tmp_path / "in.csv", header, *((text, *row) for text, row in zip(PROTEINS, rows, strict=False)))
    labelled = made(data_of(path, share=0.0, kind=kind, label_columns=columns), tmp_path)
    assert labelled.targets[:].tolist() == targets
    assert labelled.targets[:].dtype == (np.float32 if kind in ("multilabel", "regression") else np.int64)
    if kind == "per_residue":
        assert labelled.residue_targets(1).tolist() == targets[2:5]


def test_letters_that_training_lacks_are_left_out_of_held_out_residues(tmp_path):
    path = proteins(tmp_path, "HE", "HEC")
    held_out = proteins(tmp_path, "HE", "IHI", name="valid.csv")
    labels = {"kind": "per_residue", "split": "files", "validation_source": [str(held_out)]}
    message = refusal(data_of(path, **labels), tmp_path)
    assert message.startswith("record 'row4' (valid.csv, row 2): the label 'I' occurs only in held-out records")
    labelled = made(data_of(path, **labels, unseen_labels="skip"), tmp_path)
    assert labelled.residue_targets(3).tolist() == [-100, 2, -100]
    assert labelled.validation.tolist() == [2, 3]
    assert labelled.counts.residues_unseen_label == 2


def test_letters_that_mean_not_known_are_counted_and_can_be_learnt(tmp_path):
    path = proteins(tmp_path, "H-", "E-.", "?HE")
    labelled = made(data_of(path, share=0.0, kind="per_residue"), tmp_path)
    assert labelled.label_space.names == ("E", "H")
    assert "(data.labels.unknown_letters): '.', '?', '-' (2)" in labelled.counts.lines()[0]
    labelled = made(data_of(path, share=0.0, kind="per_residue", unknown_letters=".?"), tmp_path)
    assert labelled.label_space.names == ("-", "E", "H")
    assert labelled.targets.tolist() == [2, 0, 1, 0, -100, -100, 2, 1]
    held_out = proteins(tmp_path, "HE", "I-.", name="valid.csv")
    files = {"split": "files", "validation_source": [str(held_out)], "unseen_labels": "skip", "unknown_letters": ".?"}
    labelled = made(data_of(proteins(tmp_path, "HE", "EEH"), kind="per_residue", **files), tmp_path)
    assert (labelled.counts.residues_unseen_label, labelled.counts.residues_not_known) == (2, {"'.'": 1})


def test_a_store_is_made_once_and_changed_files_or_settings_make_another(tmp_path, table):
    def ensure(tokenizer: TokenizerSection | None = None, **settings: Any) -> Path:
        return ensure_labelled_store(data_of(table, **settings), tokenizer or TokenizerSection(), tmp_path / "stores")

    first = ensure()
    written = (first / "labels.json").stat().st_mtime_ns
    assert first.name.startswith("in-labelled-")
    assert ensure() == first and (first / "labels.json").stat().st_mtime_ns == written
    files = {"split": "files", "validation_source": [str(table)]}
    others = [ensure(share=0.5), ensure(split="stratified"), ensure(**files), ensure(TEXT)]
    status = table.stat()
    table.write_text(table.read_text().swapcase())  # with the same size and time
    os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="no column 'sequence'"):
        ensure()
    proteins(tmp_path, *"xxyyxxyy")
    changed = ensure()
    assert len({first, *others, changed}) == 6
    assert LabelledStore(changed).targets.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_named_store_must_be_made_of_the_source_with_the_settings(tmp_path, table):
    held_out = proteins(tmp_path, *"xy", name="valid.csv")
    files = {"split": "files", "validation_source": [str(held_out)]}
    store = tmp_path / "store"
    assert made(data_of(table, store=store, **files), tmp_path).path == store
    with pytest.raises(
        DataError, match=r"built with other settings \(labels\.missing_labels was 'error', .*choose another data\.store"
    ):
        made(data_of(table, store=store, **files, missing_labels="skip"), tmp_path)
    with pytest.raises(DataError, match=r"built from .*in\.csv, not from the current .*valid\.csv"):
        made(data_of(held_out, store=store, **files), tmp_path)
    proteins(tmp_path, *"yx", name="valid.csv")
    with pytest.raises(DataError, match=r"other files in data\.labels\.validation_source"):
        made(data_of(table, store=store, **files), tmp_path)


def test_a_labelled_store_may_be_given_as_the_source(tmp_path, table):
    path = made(data_of(table), tmp_path).path
    assert made(data_of(path), tmp_path / "elsewhere").path == path
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(DataError, match=r"built with data\.labels\.kind multiclass, not binary"):
        made(data_of(path, kind="binary"), tmp_path)
    with pytest.raises(DataError, match=r"built with model\.tokenizer\.content protein, not text"):
        made(data_of(path), tmp_path, TEXT)


@pytest.mark.parametrize("split", ["hash", "stratified"])
def test_a_group_of_records_is_never_divided(tmp_path, split):
    random = np.random.default_rng(0)
    sequences = ["".join(random.choice(list("ACDEFGHIKLMNPQRSTVWY"), 9)) for _ in range(80)]
    # Every group has both classes; a split by classes alone would divide the groups.
    groups = [f"cluster{number % 10}" for number in range(80)]
    rows = list(zip(sequences, "xyxxy" * 16, groups, strict=True))
    settings = {"split": split, "group_column": "cluster", "share": 0.3}
    path = write_table(tmp_path / "in.csv", ("sequence", "label", "cluster"), *rows)
    labelled = made(data_of(path, **settings), tmp_path)
    sides = [{groups[row] for row in side} for side in (labelled.training, labelled.validation)]
    assert sides[0] | sides[1] == {*groups} and not sides[0] & sides[1] and all(sides)
    missing = write_table(tmp_path / "missing.csv", ("sequence", "label", "cluster"), *rows[:3], ("MKV", "x", "NaN"))
    assert "missing.csv, row 4: the group is missing" in refusal(data_of(missing, **settings), tmp_path / "other")


def family(sequence: str) -> list[str]:
    """Return four similar proteins."""
    return [sequence[:start] + "W" * 12 + sequence[start + 12 :] for start in (20, 40, 60, 80)]


@pytest.mark.parametrize("kind", ["multiclass", "regression", "per_residue"])
def test_no_family_is_on_both_sides_of_a_split_by_clusters(tmp_path, kind):
    sequences = [text for first in random_sequences([120] * 20) for text in family(first)]
    labels = {"multiclass": "xxyy" * 20, "regression": range(80), "per_residue": ["HE" * 60] * 80}[kind]
    path = write_table(tmp_path / "in.csv", ("sequence", "label"), *zip(sequences, labels, strict=True))
    labelled = made(data_of(path, kind=kind, split="clusters", share=0.3), tmp_path)
    sides = [{row // 4 for row in side.tolist()} for side in (labelled.training, labelled.validation)]
    assert sides[0] | sides[1] == {*range(20)} and not sides[0] & sides[1] and len(sides[1]) == 6
    again = made(data_of(path, kind=kind, split="clusters", share=0.3), tmp_path / "again")
    assert again.checksum == labelled.checksum


def test_a_split_by_clusters_that_is_impossible_is_refused(tmp_path, table):
    rows = zip(family(random_sequences([120])[0]), "xyxy", strict=True)
    path = write_table(tmp_path / "family.csv", ("sequence", "label"), *rows)
    message = refusal(data_of(path, split="clusters", share=0.3), tmp_path)
    assert message.startswith("every cluster of similar proteins is too large to be held out (the largest has 4 of 4 r")
    with pytest.raises(ConfigError, match=r"split clusters needs model\.tokenizer\.content protein: texts have no"):
        made(data_of(table, split="clusters"), tmp_path, TEXT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels_file": "l.fasta"}, "labels_file needs kind per_residue, not multiclass"),
        ({"kind": "regression", "label_columns": ["a", "a"]}, "label_columns: a, a: a column is listed twice"),
        (
            {"split": "column", "split_column": "part", "group_column": "cluster"},
            "group_column needs split hash or stratified, not column",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LabelsSection(**settings)


RESIDUES = {"share": 0.0, "kind": "per_residue"}


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        ("abcdefgh", {}, "occurs only in held-out records; add training records with it, or give --data.labels.unseen"),
        ("abcdefgh", {"split": "stratified"}, "no class has two distinct sequences or groups (8 records)"),
        ("aa", {"share": 0.0}, "the label is 'a' in all 2 training records"),
        (("HH", "H.-"), RESIDUES, "the label is 'H' in all"),
        (("??", ".-?"), RESIDUES, "the label is missing in all"),
        ("abc", {"share": 0.0, "kind": "binary"}, "3 classes (a, b, c), but data.labels.kind binary needs two: set"),
        (("0.5", "1", "2.25"), {"share": 0.0}, "set data.labels.kind to regression"),
        (("0,5", "1", "2,25"), {"share": 0.0}, "set data.labels.kind to regression"),
        (("0.5", "1", "2.25"), {"split": "stratified"}, "kind multiclass are decimal numbers (0.5, 1, 2.25)"),
        (
            ("test", "val"),
            {"split": "column", "split_column": "label"},
            "the label is missing in all 0 training records",
        ),
        ("12", {"kind": "regression", "split": "stratified"}, "stratified needs one class per record"),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused_and_leaves_nothing(tmp_path, labels, settings, message):
    assert message in refusal(data_of(proteins(tmp_path, *labels), **settings), tmp_path)


def test_a_split_without_targets_or_held_out_records_is_refused(tmp_path, table):
    path = write_table(tmp_path / "x.csv", ("sequence", "x", "y"), ("MK", "1", "nan"), ("MKV", "2", ""))
    numbers = {"kind": "regression", "label_columns": ["x", "y"], "missing_labels": "skip", "share": 0.0}
    assert "column 'y' has no number in 2 training records" in refusal(data_of(path, **numbers), tmp_path)
    held_out = proteins(tmp_path, *"uvw", name="valid.csv")
    labels = {"split": "files", "validation_source": [str(held_out)], "unseen_labels": "skip"}
    assert "valid.csv: none of the held-out labels occurs in training; give held-out records with" in refusal(
        data_of(table, **labels), tmp_path
    )


def test_the_same_records_have_the_same_checksum_wherever_they_come_from(tmp_path, table):
    (tmp_path / "b").mkdir()
    other = proteins(tmp_path / "b", *"xyxyxyxy", name="in.tsv")
    assert made(data_of(other), tmp_path).checksum == made(data_of(table), tmp_path).checksum
    assert made(data_of(table, share=0.0), tmp_path).checksum != made(data_of(table), tmp_path).checksum
    proteins(tmp_path, *"xyxyxyxx")
    assert made(data_of(table), tmp_path).checksum != made(data_of(other), tmp_path).checksum


@pytest.mark.parametrize("name", ["labels.safetensors", "label_mappings.json", "labels.json", "sequences/data.mdb"])
def test_damage_is_noticed_when_a_store_is_opened(tmp_path, table, name):
    path = made(data_of(table), tmp_path).path
    bit = 8 * ((path / name).stat().st_size // 2) + 2
    with flipped(path / name, bit), pytest.raises(DataError, match="damaged"):
        LabelledStore(path, verify="full")


def test_sequences_of_another_store_and_other_folders_are_refused(tmp_path, table):
    path = made(data_of(table), tmp_path).path
    with pytest.raises(DataError, match=r"not a labelled store, it has no labels\.json; give a labelled"):
        LabelledStore(path / "sequences")
    other = made(data_of(proteins(tmp_path, *"xyxy", name="other.csv")), tmp_path).path
    (path / "sequences").rename(tmp_path / "own")
    (other / "sequences").rename(path / "sequences")
    with pytest.raises(DataError, match=r"not the ones that labels\.json was built for"):
        LabelledStore(path)
