"""A bit that changes on one worker is found at the next comparison, with the worker's name."""

from pathlib import Path

import pytest
import torch

from esmeray.common.errors import ConfigError
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.schema import Config, DeepSpeedSection, TrainingSection
from esmeray.training.engine import weight_check
from esmeray.training.engine.collective import WorkerContext
from esmeray.training.engine.deepspeed_settings import zero_stage
from esmeray.training.engine.weight_check import WeightsDifferError, differing_weights, weight_sums
from esmeray.training.loop.worker import train_worker
from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses
from tests.worker_group import WorkerGroup


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
    assert problem.startswith("the weights of worker 1 (on node-1) are not those of most: 1 parameter, first bias")
    problem = differing_weights(model, Workers((1, 2), (5, 2)))
    assert "worker 0 (on node-0), 1 (on node-1) are not each other's" in problem


def train_rank(rank: int, undisturbed: dict, disturbed: dict, store_path: str) -> None:
    """The second run has a bit of worker 1 flipped after step 3, and is started again."""
    context = WorkerContext(rank, 2, rank)
    train_worker(Config.model_validate(undisturbed), context, store_path)
    honest, calls = weight_check.differing_weights, []

    def flip_once(model: torch.nn.Module, *arguments):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            with torch.no_grad():
                next(model.parameters()).view(torch.int32).view(-1)[5] ^= 1
        return honest(model, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esmeray.training.loop.saving.differing_weights", flip_once)
        settings = Config.model_validate(disturbed)
        with pytest.raises(WeightsDifferError, match=r"worker 0 .*, 1 .* are not each other's"):
            train_worker(settings, context, store_path)
        assert RunFolder(settings.run.storage_path, settings.run.name).read_outcome() is None, "worth another try"
        assert train_worker(settings, context, store_path).status == "finished"


@pytest.mark.slow
def test_flipped_bit_on_one_worker_is_noticed_and_the_run_ends_as_undisturbed(
    store_path, tmp_path: Path, worker_group: WorkerGroup
):
    changes = {
        "training": {"max_steps": 6, "checksum_every_steps": 1},
        "checkpoint": {"every_steps": 2},
        "deepspeed": {"stage": 1},
    }
    undisturbed, config = (
        tiny_config(tmp_path / "undisturbed", **changes),
        tiny_config(tmp_path / "disturbed", **changes),
    )
    for one in (undisturbed, config):
        run_folder(one).path.mkdir(parents=True)
    worker_group.run(train_rank, undisturbed.model_dump(), config.model_dump(), store_path)
    (event,) = events(config, "weights_differ")
    assert event["step"] == 2
    assert event["message"].startswith("at step 3 ")
    assert events(config, "resumed")[0]["step"] == 2
    assert train_losses(config) == train_losses(undisturbed)
    expected, actual = exported_weights(undisturbed), exported_weights(config)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_it_is_refused_where_no_worker_has_all_weights():
    with pytest.raises(ConfigError, match=r"training\.checksum_every_steps: under ZeRO-3"):
        zero_stage(TrainingSection(checksum_every_steps=5), DeepSpeedSection(stage=3))
