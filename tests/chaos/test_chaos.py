"""A round on the tests' cluster, what the checker finds in a history that is wrong, and flipped bits."""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esmeray.dataset.store.conversion import ensure_store
from tests.chaos import bits
from tests.chaos.history import Attempt, problems
from tests.chaos.observed import train_observed
from tests.chaos.rounds import Met, Training
from tests.runs import events, run_folder
from tests.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Here:
    """The tests' cluster in place of machines of its own."""

    def __init__(self, address: str, disk: Path) -> None:
        self.address, self.disk, self.environment = address, disk, dict(os.environ)

    def restore(self) -> "Here":
        return self


@pytest.fixture(scope="module")
def undisturbed(worker_group: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """The steps of two workers that meet no fault, without Ray, whose workers take a minute to start."""
    round_ = Training(Here("", tmp_path_factory.mktemp("chaos")), [], spacing=3)
    run = run_folder(round_.config)
    run.path.mkdir()
    store = str(ensure_store(round_.config.data, run.stores))
    worker_group.run(train_observed, round_.folder, round_.config, store)
    yield round_
    round_.close()


def test_a_run_with_a_stopped_worker_and_a_killed_driver_takes_each_planned_step_once(
    undisturbed: Training, ray_address: str, tmp_path: Path
):
    faults = [Met("worker SIGSTOP", "update", 3, rank=1), Met("driver SIGKILL", "publishing", 9)]
    round_ = Training(Here(ray_address, tmp_path), faults, 3, undisturbed).run()
    assert not round_.wrong
    stopped, killed = faults
    assert stopped.back_s is not None and killed.back_s is not None
    run = run_folder(round_.config)
    first = events(round_.config, "resumed")[0]
    # On a busy machine the fault is met later, and a checkpoint may be as new as the copies.
    assert first["checkpoint"].endswith("in memory") or first["step"] > stopped.step
    assert "stacks of the workers:" in (round_.folder / "output.txt").read_text()
    assert "all_reduce" in (run.logs / "hung-1" / "stacks-0.txt").read_text()  # it waits for the one that is stopped
    assert not [*run.logs.glob("stacks-*")]
    round_.close()


BREAKING: dict[str, Callable[[list[Attempt]], Any]] = {
    "step 5 is lost or not planned": lambda attempts: attempts[0].steps.pop(5),
    "step 5 was not taken once by each worker": lambda attempts: attempts[0].steps[5].pop(),
    "step 5 had other batches than planned": lambda attempts: attempts[0].steps[5][0].update(batches=["other"]),
    "step 5 left other weights on another worker": lambda attempts: attempts[0].steps[5][0].update(weights=0),
    "step 5 came to other bits": lambda attempts: attempts[0].steps[5][0].update(loss="0x1p-1"),
    "while a later": lambda attempts: attempts.append(Attempt(2, 18, 0.0, steps={19: attempts[0].steps[4]})),
}


@pytest.mark.parametrize("words", BREAKING)
def test_what_is_wrong_is_found(undisturbed: Training, words: str):
    (planned,), _, _ = undisturbed.outcome()
    attempts = [copy.deepcopy(planned)]
    assert not problems(attempts, planned)
    BREAKING[words](attempts)
    assert words in str(problems(attempts, planned))


def test_a_flipped_bit_is_noticed_in_one_line_or_harmless(tmp_path: Path):
    made = bits.Bits(tmp_path, ["store, read whole", "structure store", "predicted structures"])
    flips = [made.flip(0, number) for number in range(10)]
    assert not [str(flip) for flip in flips if not flip.is_right]
    assert {flip.thing for flip in flips} == {*made.things} and "noticed" in {flip.outcome for flip in flips}
