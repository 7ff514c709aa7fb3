"""Weights of labels are read by name, and a line that names or weights none is refused with its place."""

import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.labels.values import read_label_weights

SPACE = LabelSpace("multilabel", ("GO:1", "GO:2", "GO:3"))


def test_labels_that_the_file_lacks_count_1(tmp_path):
    path = tmp_path / "weights.tsv"
    path.write_text("GO:3\t0.25\r\nGO:1\t0\r\n")
    assert read_label_weights(path, SPACE).tolist() == [0, 1, 0.25]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("GO:4\t1", r"the label 'GO:4' is not among the training records'; remove the line"),
        ("GO:1\t1", r"the label 'GO:1' stands there twice"),
        ("GO:2\t-1", r"the weight '-1' is no finite number of 0 or more; give one"),
        ("GO:2\tinf", r"the weight 'inf' is no finite number"),
        ("GO:2 1", r"the weight '' is no finite number"),
        ("GO:2\t\xff", r"not UTF-8; save the file as UTF-8"),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, message):
    path = tmp_path / "weights.tsv"
    path.write_text(f"GO:1\t2\n{line}\n", encoding="latin-1")
    with pytest.raises(DataError, match=rf"weights\.tsv, line 2: {message}"):
        read_label_weights(path, SPACE)
    with pytest.raises(DataError, match=r"can't be read: No such file"):
        read_label_weights(tmp_path / "missing.tsv", SPACE)
