"""The stage that evaluates function predictions compares the curves of both programs."""

import pytest

from benchmarks.harness.stage import WrongWorkError
from benchmarks.stages.function_evaluation import require_agreement


def test_other_curves_are_no_comparison(tmp_path):
    for name, value in (("ours/curves.tsv", 0.1), ("peer/evaluation_all.tsv", 0.2)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"ns\tf\nx\t{value}\n")
    with pytest.raises(WrongWorkError, match=r"curves differ by 0\.1"):
        require_agreement(tmp_path)
