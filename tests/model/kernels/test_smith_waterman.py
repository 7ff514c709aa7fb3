"""Scores of the kernel and of its torch fallback equal parasail's."""

import os
import subprocess
import sys

import numpy as np
import pytest

from esmeray.model.kernels.smith_waterman import LANES, SmithWaterman
from tests.conftest import REPOSITORY

parasail = pytest.importorskip("parasail")
from esmeray.alignment.scoring import Scoring, scoring  # noqa: E402 - it needs parasail

LETTERS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWYBUZOX", np.uint8)
CASES = [("BLOSUM62", 11, 1), ("BLOSUM45", 14, 2), ("PAM250", 5, 5), ("BLOSUM80", 0, 1)]


def sequences(lengths: list[int], seed: int = 0) -> list[bytes]:
    """Random sequences; every fourth is a copy of the previous one with a gap."""
    random = np.random.default_rng(seed)
    made = [random.choice(LETTERS, length).tobytes() for length in lengths]
    for number in range(3, len(made), 4):
        made[number] = made[number - 1][:40] + made[number - 1][47:] or made[number]
    return made


def expected(queries: list[bytes], targets: list[bytes], by: Scoring) -> np.ndarray:
    gaps = by.first, by.gap_extend
    known = list(map(by.known, targets))
    return np.array([[parasail.sw(by.known(q), t, *gaps, by.matrix).score for t in known] for q in queries])


def computed(queries: list[bytes], targets: list[bytes], by: Scoring, device: str) -> np.ndarray:
    align = SmithWaterman(coded(targets, by), by.scores, by.first, by.gap_extend, device)
    return np.array(list(map(align, coded(queries, by))))


def coded(residues: list[bytes], by: Scoring) -> list[np.ndarray]:
    return [by.codes[np.frombuffer(text, np.uint8)] for text in residues]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", CASES)
def test_scores_in_torch_and_on_a_gpu_equal_parasails(case, device):
    targets = sequences([1, 2, 40, 90, 3, *range(20, 20 + LANES), 150, 150, *([5000] if device == "cuda" else [])])
    queries = [targets[2], targets[-1][:333], b"W", *sequences([15, 16, 17, 33], seed=1)]
    by = scoring(*case)
    np.testing.assert_array_equal(computed(queries, targets, by, device), expected(queries, targets, by))


def test_no_sequences_and_no_query_have_no_scores():
    by = scoring()
    assert computed([b"MKV"], [], by, "cpu").shape == (1, 0)
    assert computed([b""], [b"MKV"], by, "cpu").tolist() == [[0]]


def test_scores_under_tritons_interpreter_equal_parasails():
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of torch leaves out")
    code = "from tests.model.kernels.test_smith_waterman import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def interpreted() -> None:
    """Run in a child process: Triton chooses between interpreter and compiler at import."""
    from esmeray.model.kernels.smith_waterman_triton import scores

    targets = sequences([1, 30, 12, 25, *range(2, 2 + LANES)])
    for case in CASES[:2]:
        by = scoring(*case)
        for query in (b"W", targets[1], targets[3][:16]):
            align = SmithWaterman(coded(targets, by), by.scores, by.first, by.gap_extend, "cpu")
            align._scores = lambda profile, block, by=by: scores(profile, block, LANES, by.first, by.gap_extend)
            np.testing.assert_array_equal(align(*coded([query], by)), expected([query], targets, by)[0])
