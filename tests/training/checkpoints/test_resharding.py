"""Resharding to other numbers of workers, also repeatedly, preserves the content of shards."""

import math
from collections.abc import Mapping

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.training.checkpoints.consolidation import FP32, Resharding, sharded_parameters

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5)
KEYS = (FP32, "exp_avg", "exp_avg_sq")


def named(groups: list[list[tuple[int, int]]]) -> list[dict[str, torch.Size]]:
    return [{f"{g}.{p}": torch.Size(shape) for p, shape in enumerate(group)} for g, group in enumerate(groups)]


def values_of(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
    first = 50 * int(name.replace(".", ""))
    return {key: torch.arange(shape.numel()) + first + 10_000.0 * number for number, key in enumerate(KEYS)}


def written_by_one(stage: int, groups: list[dict[str, torch.Size]], gap: int) -> dict:
    """The shard of one worker as written by DeepSpeed, with ``gap`` elements between parameters."""
    gaps = [[gap] * (len(shapes) - 1) + [0] for shapes in groups]
    flat: list[dict[str, torch.Tensor]] = []
    for shapes, between in zip(groups, gaps, strict=True):
        parts = {key: [] for key in KEYS}
        for (name, shape), zeros in zip(shapes.items(), between, strict=True):
            for key, value in values_of(name, shape).items():
                parts[key] += [value, torch.zeros(zeros if stage < 3 else 0)]
        flat.append({key: torch.cat(pieces) for key, pieces in parts.items()})
    state = {g: {"step": torch.tensor(7.0 + g), **{key: part[key] for key in KEYS[1:]}} for g, part in enumerate(flat)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1 * g, "params": [g]} for g in range(len(groups))]}
    common = {"zero_stage": stage, "loss_scaler": DynamicLossScaler(2.0**9, 2.0, 10, 1.0, 2, False)}
    if stage == 3:
        return common | {"fp32_flat_groups": [part[FP32] for part in flat], "optimizer_state_dict": optimizer}
    weights = [part[FP32] for part in flat]
    return common | {
        "single_partition_of_fp32_groups": weights,
        "base_optimizer_state": optimizer,
        "param_alignment_paddings": gaps,
    }


def cut(groups: list, shards: list[dict], new_groups: list, workers: int) -> list[dict]:
    return [Resharding(None, new_groups, rank, workers).shard(groups, shards) for rank in range(workers)]


def assert_holds(groups: list[Mapping[str, torch.Size]], shards: list[dict]) -> None:
    for name, parameter in sharded_parameters(groups, shards).items():
        expected = values_of(name, parameter.shape)
        assert {key: torch.cat(pieces).tolist() for key, pieces in parameter.pieces.items()} == {
            key: value.tolist() for key, value in expected.items()
        }
        assert parameter.rest == {"step": torch.tensor(7.0 + int(name.split(".")[0]))}


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(SHAPES, min_size=1, max_size=3).map(named),
    workers=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    gap=st.integers(0, 3),
    stage=st.sampled_from([1, 2, 3]),
)
def test_resharding_preserves_weights_and_moments(groups, workers, gap, stage):
    shards = [written_by_one(stage, groups, gap)]
    for count in workers:
        shards = cut(groups, shards, groups, count)
        assert_holds(groups, shards)
        assert {shard["loss_scaler"].cur_scale for shard in shards} == {512.0}
    for g, shapes in enumerate(groups):
        lengths = {key: {len(vector) for vector in vectors_of(shards, g, key)} for key in KEYS}
        numel = sum(shape.numel() + gap for shape in shapes.values()) - gap
        length = 2 * math.ceil(numel / (2 * workers[-1]))
        if stage == 3:
            length = sum(math.ceil(shape.numel() / workers[-1]) for shape in shapes.values())
        assert lengths == {key: {length} for key in KEYS}, "equal parts, as DeepSpeed's collectives need"


def vectors_of(shards: list[dict], group: int, key: str) -> list[torch.Tensor]:
    optimizer = "optimizer_state_dict" if shards[0]["zero_stage"] == 3 else "base_optimizer_state"
    if key != FP32:
        return [shard[optimizer]["state"][group][key] for shard in shards]
    weights = "fp32_flat_groups" if shards[0]["zero_stage"] == 3 else "single_partition_of_fp32_groups"
    return [shard[weights][group] for shard in shards]


def test_state_of_an_optimizer_that_took_no_step_is_none():
    groups = named([[(2, 3)]])
    shard = written_by_one(2, groups, 0)
    shard["base_optimizer_state"]["state"] = {}
    assert [part["base_optimizer_state"]["state"] for part in cut(groups, [shard], groups, 2)] == [{0: {}}] * 2
