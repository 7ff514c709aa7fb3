"""From the shards of a checkpoint to whole fp32 weights, without starting a process group.

DeepSpeed's own ``zero_to_fp32`` unpickles whatever the files hold; this reads tensors only. Layouts are those of
DeepSpeed 0.19.8: stages 1 and 2 keep, for each parameter group, one flat fp32 vector cut into equal parts over the
ranks; stage 3 cuts each parameter on its own; stage 0 keeps whole weights.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError
from run_folder.checkpoints import CheckpointFolder
from training.checkpoints.writer import load_tensors


def full_precision_state(folder: CheckpointFolder) -> dict[str, Tensor]:
    """Trainable parameters and persistent buffers, in fp32 on the CPU; CheckpointError where a file is damaged."""
    manifest = folder.verify()
    names = [entry.name for rank in sorted(manifest.files) for entry in manifest.files[rank]]
    models = [load_tensors(folder.path / name) for name in names if name.endswith("model_states.pt")]
    shards = [
        load_tensors(folder.path / name)["optimizer_state_dict"] for name in names if name.endswith("optim_states.pt")
    ]
    if not models:
        raise CheckpointError(f"{folder.path}: holds no model")
    # What rank 0 keeps whole: all weights up to stage 2, buffers in stage 3.
    whole = {name: value for name, value in models[0]["module"].items() if isinstance(value, Tensor) and value.numel()}
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in whole.items()}
    if not shards or "zero_stage" not in shards[0]:
        return state
    merge = _merge_stage_3 if int(shards[0]["zero_stage"]) == 3 else _merge_stage_2
    return state | merge(models[0]["param_shapes"], shards)


def _merge_stage_2(groups: list[Mapping[str, torch.Size]], shards: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    state = {}
    for index, shapes in enumerate(groups):
        flat = torch.cat([shard["single_partition_of_fp32_groups"][index] for shard in shards])
        offset = 0
        for name, shape in shapes.items():
            state[name] = flat[offset : offset + shape.numel()].view(shape).clone()
            offset += shape.numel()
    return state


def _merge_stage_3(groups: list[Mapping[str, torch.Size]], shards: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    parts = [torch.cat([group.reshape(-1) for group in shard["fp32_flat_groups"]]) for shard in shards]
    state, offset = {}, 0
    for shapes in groups:
        for name, shape in shapes.items():
            length = math.ceil(shape.numel() / len(parts))
            whole = torch.cat([shard[offset : offset + length] for shard in parts])
            state[name] = whole[: shape.numel()].view(shape).clone()
            offset += length
    return state
