"""Labels are converted to numbers and back; labels without a training record are reported."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.labels.values import read_label_weights
from esmeray.dataset.targets import LabelSpace


@settings(deadline=None, max_examples=50)
@given(labels=st.lists(st.lists(st.sampled_from("abcdz"), unique=True), min_size=1, max_size=20), data=st.data())
def test_rows_of_sparse_targets_are_those_of_the_dense_ones(labels, data):
    dense = np.array([[name in names for name in "abcd"] for names in labels], dtype=np.float32)
    dense[["z" in names for names in labels]] = np.nan
    sparse, _ = LabelSpace("multilabel", tuple("abcd")).encode(labels)
    by_mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(labels), max_size=len(labels))))
    by_number = np.array(data.draw(st.lists(st.integers(0, len(labels) - 1))), dtype=np.int64)
    for rows in (by_mask, by_number, slice(None, None, 2), slice(0, 0), slice(1, 5)):
        np.testing.assert_array_equal(sparse[rows], dense[rows])


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("multiclass", ["a", "b", "b", "z"]),
        ("multilabel", [["a"], ["b"], [], ["b", "z"]]),
        ("per_residue", ["", "ab", "", "azb"]),
    ],
)
def test_an_unseen_label_is_named_with_its_record(kind, labels):
    assert LabelSpace(kind, ("a", "b")).encode(labels)[1] == ("z", 3)


def test_whole_numbers_may_be_classes():
    assert str(LabelSpace.of(["0.0", "17", "2e3"], "multiclass", ["label"])) == "multiclass, 3 classes (0.0, 17, 2e3)"


def test_the_mappings_are_those_that_hugging_face_knows_or_refused(tmp_path):
    space = LabelSpace.of(["yes", "no", "yes"], "binary", ["label"])
    space.save(tmp_path)
    assert LabelSpace.load(tmp_path) == space
    mappings = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    path = tmp_path / "label_mappings.json"
    assert json.loads(path.read_text()) == {"kind": "binary", **mappings}
    for labels in ({"0": "b", "1": "yes"}, None):
        path.write_text(json.dumps({"kind": "binary", **mappings, "id2label": labels}))
        with pytest.raises(DataError, match=r"label_mappings\.json: damaged"):
            LabelSpace.load(tmp_path)


TERMS = LabelSpace("multilabel", ("GO:1", "GO:2", "GO:3"))


def test_labels_that_a_file_of_weights_lacks_count_1(tmp_path):
    path = tmp_path / "weights.tsv"
    path.write_text("GO:3\t0.25\r\nGO:1\t0\r\n")
    assert read_label_weights(path, TERMS).tolist() == [0, 1, 0.25]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("GO:4\t1", "the label 'GO:4' does not occur in the training records; remove the line"),
        ("GO:1\t1", "the label 'GO:1' is listed twice"),
        ("GO:2\t-1", "invalid weight '-1'; give a finite number of at least 0"),
        ("GO:2 1", "invalid weight ''; give a finite number"),
        ("GO:2\t\xff", "not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_bad_lines_of_weights_are_refused(tmp_path, line, message):
    path = tmp_path / "weights.tsv"
    path.write_text(f"GO:1\t2\n{line}\n", encoding="latin-1")
    with pytest.raises(DataError, match=rf"weights\.tsv, line 2: {message}"):
        read_label_weights(path, TERMS)
    with pytest.raises(DataError, match=r"can't be read: No such file"):
        read_label_weights(tmp_path / "missing.tsv", TERMS)
