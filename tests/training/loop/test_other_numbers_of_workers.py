"""A run that changes from 2 to 3 workers equals an unchanged run, under every DeepSpeed stage.

A step has three batches, so one of two workers takes an empty batch. tests/training/checkpoints/test_resharding.py
tests other numbers of workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from esmeray.training.config import Config
from esmeray.training.loop import worker
from tests.runs import events, run_folder, tiny_config, train_losses
from tests.tasks.test_diffusion import diffusion_config
from tests.training.runs import (
    Turn,
    assert_same_to_rounding,
    assert_shards_make_the_exported_weights,
    damage,
    lost_in_step,
    nan_in_steps,
    train_in_turn,
)

RUNS = ["stage 0", "muon 2", "stage 3", "dropout 1"]
"""Settings that depend on the sharding of parameters or on randomness, with a DeepSpeed stage each."""
LOST_UNDER = (2, 3)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def turn_of(name: str, folder: Path, store_path: str) -> Turn:
    """A run with the stage at the end of its name."""
    changes = {
        "deepspeed": {"stage": int(name[-1])},
        "model": {"task": "masked_lm"},
        "batch": {"global_tokens": 3 * 256},
        "training": {"max_steps": 6, "evaluate_every_steps": 100, "precision": name[:4] if "bf16" in name else "fp32"},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
    }
    if name.startswith("muon"):
        changes["training"]["optimizer"] = "muon"
    if name.startswith("dropout"):
        changes["model"] = {"diffusion": {"encoder": {"dropout": 0.2}}}
        return Turn(*diffusion_config(folder, **changes))
    return Turn(tiny_config(folder, **changes), store_path)


@contextmanager
def faults(nan_in: set[int], lost_in: int, rank: int) -> Iterator[None]:
    # Patched here, because it runs in the process of a worker.
    with nan_in_steps(nan_in), lost_in_step(lost_in), mock.patch.object(worker, "MAX_NONFINITE_STEPS", 2):
        yield


def rewound(stage: int, folder: Path, store_path: str, nan_in: set[int], lost_in: int = 0) -> Turn:
    """A run that rewinds after two consecutive steps with a loss that is not finite."""
    config = turn_of(f"stage {stage}", folder, store_path).config
    training = config.training.model_copy(update={"on_divergence": "rewind"})
    config = config.model_copy(update={"training": training})
    return Turn(config, store_path, partial(faults, nan_in, lost_in))


@pytest.fixture(scope="module")
def trained(worker_group, store_path, tmp_path_factory) -> dict[str, dict[str, Config]]:
    """Runs by name: with one worker, two workers, changing numbers, and a lost worker or shard.

    All runs share the worker groups, which take seconds to start.
    """
    root = tmp_path_factory.mktemp("trained")

    def turns(kind: str, *names: str) -> dict[str, Turn]:
        return {name: turn_of(name, root / f"{kind} {name}", store_path) for name in names}

    def rewinding(kind: str, *faults: Any) -> dict[str, Turn]:
        return {f"stage {stage}": rewound(stage, root / f"{kind} {stage}", store_path, *faults) for stage in LOST_UNDER}

    kinds = {"one": turns("one", "muon 2", "bf16 2"), "damaged": turns("damaged", "muon 2")}
    kinds |= {kind: turns(kind, *RUNS, "bf16 2") for kind in ("two", "changing")}
    kinds |= {"kept": rewinding("kept", {2, 3}), "lost one": rewinding("lost one", set(), 4)}
    (damaged,) = kinds["damaged"].values()
    at_first = [damaged._replace(stop_at=4), *kinds["kept"].values(), *kinds["lost one"].values()]
    then = [damaged, *rewinding("lost one", {0, 1}).values()]
    resumed = kinds["changing"].values()
    begun = [turn._replace(stop_at=2) for turn in resumed]
    train_in_turn(worker_group, 2, *kinds["two"].values(), *at_first, *begun)
    damage(run_folder(damaged.config).checkpoints / "step-00000004", "*zero_pp_rank_1*optim_states.pt")
    train_in_turn(worker_group, 1, *kinds["one"].values(), *then)
    train_in_turn(worker_group, 3, *resumed)
    return {kind: {name: turn.config for name, turn in of_kind.items()} for kind, of_kind in kinds.items()}


@pytest.mark.parametrize("name", RUNS)
def test_run_with_changing_numbers_of_workers_is_the_one_that_kept_them(trained, name):
    changing = trained["changing"][name]
    assert [event["workers"] for event in events(changing, "resumed")] == [3]
    assert len(train_losses(changing)) == 6
    # AdamW divides a gradient by its own magnitude, so rounding becomes visible if the gradient is near 0.
    assert_same_to_rounding(changing, trained["two"][name], atol=2e-4 if name == "dropout 1" else 1e-5)


def test_two_workers_match_one_and_their_shards_are_the_exported_weights(trained, tmp_path):
    two = trained["two"]["muon 2"]
    assert_same_to_rounding(two, trained["one"]["muon 2"])
    assert_shards_make_the_exported_weights(two, tmp_path / "from-shards")


def test_bf16_run_with_changing_workers_differs_by_rounding_only(trained):
    one, two, changing = (train_losses(trained[kind]["bf16 2"]) for kind in ("one", "two", "changing"))
    assert len(changing) == len(two) == 6
    difference = max(abs(one[step] - two[step]) for step in two)
    # Both differences come from the order of sums: their size is similar on any machine, but either may be larger.
    assert max(abs(changing[step] - two[step]) for step in two) <= 2 * difference


def test_damaged_shard_of_a_lost_worker_resumes_one_checkpoint_earlier(trained):
    (damaged,) = trained["damaged"].values()
    assert "step-00000004 can't be used" in events(damaged, "warning")[0]["message"]
    assert events(damaged, "resumed")[0]["step"] == 2
    assert_same_to_rounding(damaged, trained["two"]["muon 2"])


@pytest.mark.parametrize("stage", LOST_UNDER)
def test_run_that_lost_a_worker_rewinds_to_a_checkpoint_of_more_workers(trained, stage):
    lost_one, kept = (trained[kind][f"stage {stage}"] for kind in ("lost one", "kept"))
    assert [event["checkpoint"] for event in events(lost_one, "resumed")] == ["step-00000002"]
    assert [event["step"] for event in events(lost_one, "rewound")] == [4]
    assert_same_to_rounding(lost_one, kept)
