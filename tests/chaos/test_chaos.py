"""The check of a history finds each kind of problem; and a short run of the phase that flips bits."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import main
from tests.chaos.history import Attempt, problems, read_history


@pytest.fixture
def planned(tmp_path: Path) -> Attempt:
    """Six steps of two workers without a fault."""
    start = {"kind": "start", "attempt": "a", "world": 2, "step": 0, "time": 0.0, "pid": 1}
    step = {"kind": "step", "attempt": "a", "world": 2, "weights": 7, "loss": "0x1p+0"}
    taken = [(number, rank) for number in range(1, 7) for rank in range(2)]
    steps = [step | {"step": n, "rank": rank, "batches": [f"{n} {rank}"], "time": float(n)} for n, rank in taken]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (start, *steps)))
    (attempt,) = read_history(tmp_path / "history.jsonl")
    return attempt


BREAKING: dict[str, Callable[[list[Attempt]], Any]] = {
    "step 5 is lost or not planned": lambda attempts: attempts[0].steps.pop(5),
    "step 5 was not taken once by each worker": lambda attempts: attempts[0].steps[5].pop(),
    "step 5 had other batches than planned": lambda attempts: attempts[0].steps[5][0].update(batches=["other"]),
    "step 5 left other weights on another worker": lambda attempts: attempts[0].steps[5][0].update(weights=0),
    "step 5 computed other bits": lambda attempts: attempts[0].steps[5][0].update(loss="0x1p-1"),
    "while a later": lambda attempts: attempts.append(Attempt(2, 6, 0.0, steps={7: attempts[0].steps[4]})),
}


@pytest.mark.parametrize("words", BREAKING)
def test_what_is_wrong_is_found(planned: Attempt, words: str):
    attempts = [copy.deepcopy(planned)]
    assert not problems(attempts, planned)
    BREAKING[words](attempts)
    assert words in str(problems(attempts, planned))


@pytest.mark.slow
def test_a_flipped_bit_is_noticed_in_one_line_or_harmless(tmp_path: Path):
    things = ["store, read whole", "structure store", "predicted structures"]
    table = tmp_path / "table.md"
    assert not main(["--phases", "bits", "--flips", "4", "--seed", "6", "--out", str(table), "--only", *things])
    header, _, total, *rows = (line.split(" | ") for line in table.read_text().splitlines() if line)
    assert header[3] == "noticed" and int(total[3]) > 0
    assert {row[0].removeprefix("| ") for row in rows} == {*things}
