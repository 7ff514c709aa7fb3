"""The state of a checkpoint cut anew for another number of workers, as DeepSpeed 0.19.8 would have written it.

In: a verified checkpoint, a worker's rank among the new ones, the parameter groups of its engine. Out: the contents of
the files that DeepSpeed asks for by the names of the new number. Without ZeRO every worker reads the same file, and
nothing is cut.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esmeray.run_folder.checkpoints import MODEL_FILE, CheckpointFolder
from esmeray.training.checkpoints.consolidation import (
    FP32,
    Shapes,
    is_stage_3,
    paddings,
    read_shards,
    shard_keys,
    sharded_parameters,
    span,
)
from esmeray.training.checkpoints.writer import load_tensors

ALIGNMENT = 2
"""Stages 1 and 2 fill a group's vector to a multiple of so many elements a worker (``nccl_start_alignment_factor``)."""

_OF_ONE_WORKER = ("partition_count", "group_paddings", "param_slice_mappings")
"""Entries of a shard that would be wrong in another's; DeepSpeed does not read them."""


@dataclass(frozen=True)
class Resharding:
    """A checkpoint for the worker ``rank`` of ``world_size``.

    ``groups`` are the engine's: stage 3 may split one of the optimizer's, by the size of a worker's part.
    """

    folder: CheckpointFolder
    groups: list[Shapes]
    rank: int
    world_size: int

    def load(self, path: Path, map_location: Any = "cpu") -> Any:
        """The content of a file that DeepSpeed asks for; CheckpointError where one that it is made of is damaged."""
        if path.name.endswith(MODEL_FILE):
            return load_tensors(path, map_location) | {"dp_world_size": self.world_size}
        # All shards by every worker: they are mapped, and what is not cut out is not read.
        model, shards = read_shards(self.folder)
        return {"optimizer_state_dict": self.shard(model["param_shapes"], shards)}

    def shard(self, groups: list[Shapes], shards: list[dict[str, Any]]) -> dict[str, Any]:
        """This worker's shard, of all those that were written of the parameters of ``groups``."""
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
            # A step of its own for each vector: torch counts it up in place.
            states[index] = state | {key: value.clone() for key, value in members[0].rest.items()}
        settings = self._settings(groups, first[optimizer]["param_groups"])
        # All else is the same in each shard, the loss scale among it.
        shared = {key: value for key, value in first.items() if key not in _OF_ONE_WORKER}
        return shared | {weights: vectors, optimizer: {"state": states, "param_groups": settings}}

    def _settings(self, groups: list[Shapes], written: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The optimizer's settings by group, each with the numbers of the vectors that it has now."""
        settings = []
        for own in written:
            names = {name for index in own["params"] for name in groups[index]}
            # Stage 3 may have split a group: each of its vectors has a number of its own.
            numbers = [index for index, shapes in enumerate(self.groups) if not names.isdisjoint(shapes)]
            settings.append(own | {"params": numbers})
        return settings

    def _cut_group(self, members: list[list[Tensor]], gaps: list[int]) -> Tensor:
        """This worker's part of parameters that are laid end to end and cut once (stages 1 and 2)."""
        filled = [[*pieces, pieces[0].new_zeros(gap)] for pieces, gap in zip(members, gaps, strict=True)]
        return self._part([piece for pieces in filled for piece in pieces], ALIGNMENT)

    def _cut_each(self, members: list[list[Tensor]], gaps: list[int]) -> Tensor:
        """This worker's parts of parameters that are cut one by one (stage 3)."""
        return torch.cat([self._part(pieces, 1) for pieces in members])

    def _part(self, pieces: list[Tensor], alignment: int) -> Tensor:
        """One of ``world_size`` equal parts, with zeros where the pieces have ended."""
        numel = sum(piece.numel() for piece in pieces)
        length = alignment * math.ceil(numel / (alignment * self.world_size))
        views = span(pieces, self.rank * length, (self.rank + 1) * length)
        missing = length - sum(view.numel() for view in views)
        return torch.cat([*views, views[0].new_zeros(missing)])
