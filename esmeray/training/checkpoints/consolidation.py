"""Convert a checkpoint's shards to whole parameters, or to the shards of another number of workers.

No process group is needed. DeepSpeed's own ``zero_to_fp32`` unpickles whatever the files contain. This module reads
tensors only, from memory-mapped files, so that a process holds only the parts that it cuts out. Layouts of DeepSpeed
0.19.8:

- stage 0 keeps whole weights, and every worker reads the same file;
- stages 1 and 2 keep one flat fp32 vector per parameter group, cut into equal parts over the ranks, and the same for
  the moments;
- stage 3 cuts each parameter on its own.

For another number of workers the contents of the files that DeepSpeed loads are cut again, as it would have written
them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esmeray.common.errors import CheckpointError
from esmeray.run_folder.checkpoints import MODEL_FILE, OPTIMIZER_FILE, CheckpointFolder
from esmeray.training.checkpoints.writer import load_tensors

FP32 = "fp32"
Shapes = Mapping[str, torch.Size]
"""Shapes of a group's parameters by name, in the order of its vector."""


class ShardedParameter(NamedTuple):
    """A parameter in the shards.

    ``pieces``: views that, concatenated, give the flat weights (:data:`FP32`), the moments (by the optimizer's names)
    and the mean of the weights. ``rest``: the optimizer's other state of the parameter, i.e. its step.
    """

    shape: torch.Size
    pieces: dict[str, list[Tensor]]
    rest: dict[str, Tensor]


def full_precision_state(folder: CheckpointFolder, weights: str = FP32) -> dict[str, Tensor]:
    """Return trainable parameters and persistent buffers in fp32 on the CPU.

    ``weights``: the weights of the step, or their mean (:data:`~esmeray.training.engine.zero.WEIGHT_MEAN`) if the
    checkpoint has it. Raises CheckpointError if a file is damaged or the mean is missing.
    """
    folder.verify()
    model, shards = read_shards(folder)
    state: dict[str, Tensor] = {}
    # Rank 0 keeps these whole: all weights up to stage 2, only buffers in stage 3.
    for name, value in model["module"].items():
        if isinstance(value, Tensor) and value.numel():
            state[name] = value.float() if value.is_floating_point() else value
    # Without ZeRO the optimizer's state is one file, and the weights are already whole.
    is_cut = bool(shards) and "zero_stage" in shards[0]
    parameters = sharded_parameters(model["param_shapes"], shards) if is_cut else {}
    if weights != FP32 and not any(weights in parameter.pieces for parameter in parameters.values()):
        raise CheckpointError(f"{folder.path}: has no averaged weights, because training.weight_mean was not set")
    for name, parameter in parameters.items():
        state[name] = torch.cat(parameter.pieces[weights]).float().view(parameter.shape)
    # Tied weights are trained under one of their names; rank 0 stores them under each.
    tied = (model.get("shared_params") or {}).items()
    return state | {name: state[trained] for name, trained in tied if trained in parameters}


def read_shards(folder: CheckpointFolder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read rank 0's model state and every rank's optimizer state (none without ZeRO). Raises CheckpointError."""
    manifest = folder.manifest()
    paths = [folder.path / entry.name for rank in sorted(manifest.files) for entry in manifest.files[rank]]
    models = [path for path in paths if path.name.endswith(MODEL_FILE)]
    if not models:
        raise CheckpointError(f"{folder.path}: contains no model")
    shards = [load_tensors(path, mmap=True) for path in paths if path.name.endswith(OPTIMIZER_FILE)]
    return load_tensors(models[0], mmap=True), [shard["optimizer_state_dict"] for shard in shards]


def sharded_parameters(groups: list[Shapes], shards: list[dict[str, Any]]) -> dict[str, ShardedParameter]:
    """Return the parameters of all ``groups`` by name."""
    weights, optimizer = shard_keys(shards[0])
    parameters = {}
    for index, shapes in enumerate(groups):
        # An optimizer that has not taken a step yet has no state.
        states = [shard[optimizer]["state"].get(index, {}) for shard in shards]
        # State with dimensions is cut like the weights; the rest (the step) is the same on every rank.
        parts = {key: [state[key] for state in states] for key, value in states[0].items() if value.dim()}
        parts[FP32] = [shard[weights][index].reshape(-1) for shard in shards]
        rest = {key: value for key, value in states[0].items() if not value.dim()}
        offset = 0
        for (name, shape), padding in zip(shapes.items(), paddings(shards[0], index, shapes), strict=True):
            size = shape.numel()
            if is_stage_3(shards[0]):
                # Each rank's vector has this many elements of the parameter; the last rank's is padded with zeros.
                length = math.ceil(size / len(shards))
                own = {key: [vector[offset : offset + length] for vector in part] for key, part in parts.items()}
                pieces = {key: span(part, 0, size) for key, part in own.items()}
                offset += length
            else:  # the ranks' parts make up one vector of the group
                pieces = {key: span(part, offset, offset + size) for key, part in parts.items()}
                offset += size + padding
            parameters[name] = ShardedParameter(shape, pieces, rest)
    return parameters


def is_stage_3(shard: Mapping[str, Any]) -> bool:
    return int(shard["zero_stage"]) == 3


def shard_keys(shard: Mapping[str, Any]) -> tuple[str, str]:
    """Keys of a shard: the weights, one vector per group, and AdamW's state."""
    of_stage_3 = ("fp32_flat_groups", "optimizer_state_dict")
    return of_stage_3 if is_stage_3(shard) else ("single_partition_of_fp32_groups", "base_optimizer_state")


def paddings(shard: Mapping[str, Any], group: int, shapes: Shapes) -> list[int]:
    """Padding elements after each parameter in its group's vector (stages 1 and 2, DeepSpeed's
    ``parameter_alignment``)."""
    return shard["param_alignment_paddings"][group] if "param_alignment_paddings" in shard else [0] * len(shapes)


def span(pieces: list[Tensor], start: int, stop: int) -> list[Tensor]:
    """Return views of the elements from ``start`` to ``stop`` of the concatenated pieces."""
    views = []
    offset = 0
    for piece in pieces:
        # A piece outside the range gives an empty view: callers need the dtype of the first one.
        views.append(piece[max(start - offset, 0) : max(stop - offset, 0)])
        offset += piece.numel()
    return views


ALIGNMENT = 2
"""Stages 1 and 2 pad a group's vector to a multiple of this per worker (``nccl_start_alignment_factor``), in
elements."""

_OF_ONE_WORKER = ("partition_count", "group_paddings", "param_slice_mappings")
"""Entries of a shard that are wrong for another worker; DeepSpeed does not read them."""


class Resharding(NamedTuple):
    """A checkpoint converted for the worker ``rank`` of ``world_size``.

    ``groups`` are the engine's groups. Stage 3 may split an optimizer's group, depending on the size of a worker's
    part.
    """

    folder: CheckpointFolder
    groups: list[Shapes]
    rank: int
    world_size: int

    def load(self, path: Path, map_location: Any = "cpu") -> Any:
        """Return the content of a file that DeepSpeed loads. Raises CheckpointError if one of its source files is
        damaged."""
        if path.name.endswith(MODEL_FILE):
            return load_tensors(path, map_location) | {"dp_world_size": self.world_size}
        # Every worker opens all shards: they are memory-mapped, and only the parts that are used are read.
        model, shards = read_shards(self.folder)
        return {"optimizer_state_dict": self.shard(model["param_shapes"], shards)}

    def shard(self, groups: list[Shapes], shards: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this worker's shard, given all written shards of the parameters of ``groups``."""
        first = shards[0]
        weights, optimizer = shard_keys(first)
        parameters = sharded_parameters(groups, shards)
        cut = self._cut_each if is_stage_3(first) else self._cut_group
        vectors: list[Tensor] = []
        states = {}
        for index, shapes in enumerate(self.groups):
            members = [parameters[name] for name in shapes]
            gaps = paddings(first, index, shapes)
            state = {key: cut([member.pieces[key] for member in members], gaps) for key in members[0].pieces}
            vectors.append(state.pop(FP32))
            # Each vector needs its own step tensor: torch increments it in place.
            states[index] = state | {key: value.clone() for key, value in members[0].rest.items()}
        settings = self._settings(groups, first[optimizer]["param_groups"])
        # Everything else is the same in each shard, including the loss scale.
        shared = {key: value for key, value in first.items() if key not in _OF_ONE_WORKER}
        return shared | {weights: vectors, optimizer: {"state": states, "param_groups": settings}}

    def _settings(self, groups: list[Shapes], written: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the optimizer's settings by group, with the indices of its vectors in the new layout."""
        settings = []
        for own in written:
            names = {name for index in own["params"] for name in groups[index]}
            # Stage 3 may have split a group, and then each of its vectors has its own index.
            numbers = [index for index, shapes in enumerate(self.groups) if not names.isdisjoint(shapes)]
            settings.append(own | {"params": numbers})
        return settings

    def _cut_group(self, members: list[list[Tensor]], gaps: list[int]) -> Tensor:
        """Return this worker's part of parameters that are concatenated and cut once (stages 1 and 2)."""
        filled = [[*pieces, pieces[0].new_zeros(gap)] for pieces, gap in zip(members, gaps, strict=True)]
        return self._part([piece for pieces in filled for piece in pieces], ALIGNMENT)

    def _cut_each(self, members: list[list[Tensor]], gaps: list[int]) -> Tensor:
        """Return this worker's parts of parameters that are cut one by one (stage 3)."""
        return torch.cat([self._part(pieces, 1) for pieces in members])

    def _part(self, pieces: list[Tensor], alignment: int) -> Tensor:
        """Return one of ``world_size`` equal parts, padded with zeros after the end of the pieces."""
        length = alignment * math.ceil(sum(map(torch.numel, pieces)) / (alignment * self.world_size))
        views = span(pieces, self.rank * length, (self.rank + 1) * length)
        return torch.cat([*views, views[0].new_zeros(length - sum(map(torch.numel, views)))])
