"""A bit that changes on one worker is found at the next comparison, with the worker's name."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from esmeray.common.errors import ConfigError
from esmeray.training.engine import weight_check
from esmeray.training.engine.deepspeed_settings import zero_stage
from esmeray.training.engine.weight_check import WeightsDifferError, differing_weights, weight_sums
from esmeray.training.loop import checkpoints
from esmeray.training.section import DeepSpeedSection, TrainingSection
from tests.runs import events, run_folder, tiny_config
from tests.training.runs import Turn, assert_same_run, train_in_turn


class Workers:
    """The control group of workers with these sums."""

    def __init__(self, *sums: tuple[int, ...]) -> None:
        self._sums = sums

    def gather(self, value: tuple[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"node-{rank}", sums) for rank, sums in enumerate(self._sums)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_single_bit_changes_the_sum(dtype):
    weights = torch.randn(7).to(dtype)
    before = weight_sums([weights])
    bits = weights.view({4: torch.int32, 2: torch.int16}[weights.element_size()])
    for bit in range(8 * weights.element_size()):
        flipped = bits.clone()
        flipped[3] ^= torch.tensor(1 << bit).to(bits.dtype)
        assert weight_sums([flipped.view(dtype)]) != before


def test_worker_that_differs_from_most_is_named_with_its_host_and_parameter():
    model = torch.nn.Linear(2, 2)
    assert differing_weights(model, Workers((1, 2), (1, 2), (1, 2))) is None
    problem = differing_weights(model, Workers((1, 2), (1, 3), (1, 2)))
    assert problem.startswith("the weights of worker 1 (on node-1) differ from most other workers: 1 parameter")
    problem = differing_weights(model, Workers((1, 2), (5, 2)))
    assert "worker 0 (on node-0), 1 (on node-1) differ from each other" in problem


@contextmanager
def bit_flipped_after_step_3(rank: int) -> Iterator[None]:
    """On worker 1; every worker ends for another try."""
    honest, calls = weight_check.differing_weights, []

    def flip_once(model: torch.nn.Module, *arguments):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            with torch.no_grad():
                next(model.parameters()).view(torch.int32).view(-1)[5] ^= 1
        return honest(model, *arguments)

    differ = pytest.raises(WeightsDifferError, match=r"worker 0 .*, 1 .* differ from each other")
    with mock.patch.object(checkpoints, "differing_weights", flip_once), differ:
        yield


@pytest.mark.slow
def test_flipped_bit_on_one_worker_is_noticed_and_the_run_ends_as_undisturbed(store_path, tmp_path, worker_group):
    changes = {
        "training": {"max_steps": 6, "checksum_every_steps": 1},
        "checkpoint": {"every_steps": 2},
        "deepspeed": {"stage": 1},
    }
    undisturbed, config = (tiny_config(tmp_path / name, **changes) for name in ("undisturbed", "disturbed"))
    disturbed = Turn(config, store_path, bit_flipped_after_step_3)
    train_in_turn(worker_group, 2, Turn(undisturbed, store_path), disturbed)
    assert run_folder(config).read_outcome() is None, "worth another try"
    train_in_turn(worker_group, 2, Turn(config, store_path))
    (event,) = events(config, "weights_differ")
    assert event["step"] == 2
    assert event["message"].startswith("at step 3 ")
    assert events(config, "resumed")[0]["step"] == 2
    assert_same_run(config, undisturbed)


def test_it_is_refused_where_no_worker_has_all_weights():
    with pytest.raises(ConfigError, match=r"training\.checksum_every_steps: under ZeRO-3"):
        zero_stage(TrainingSection(checksum_every_steps=5), DeepSpeedSection(stage=3))
