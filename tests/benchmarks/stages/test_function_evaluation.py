"""The stage of evaluating functions holds both programs to the same curves."""

import pytest

from benchmarks.harness.stage import WrongWorkError
from benchmarks.stages.function_evaluation import _difference


def test_other_curves_are_no_comparison(tmp_path):
    for name, value in (("ours/curves.tsv", 0.1), ("peer/evaluation_all.tsv", 0.2)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"ns\tf\nx\t{value}\n")
    with pytest.raises(WrongWorkError, match=r"curves differ by 0\.1"):
        _difference(tmp_path)
