"""Batches of proteins with the groups of each, and the groups that steps are planned by.

Shape legend: R records, N sequences of a batch, M maximum number of labels of a record, L levels.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.dataset.batches.loader import Indices, ResidueSource, SourceBatch
from esmeray.dataset.batches.plan import Groups
from esmeray.dataset.batches.preparation import PreparationSettings, PreparedBatch
from esmeray.dataset.packed_batch import TARGETS
from esmeray.dataset.store.reader import Store
from esmeray.dataset.targets import (
    SparseTargets,
    level_ids,
)


class GroupSource(ResidueSource):
    """Batches of a store of proteins with the groups of each; ``groups_RML`` as in :func:`group_ids`."""

    def __init__(self, store: Store, settings: PreparationSettings, groups_RML: NDArray[np.int64]) -> None:
        super().__init__(store, settings)
        self._groups_RML = groups_RML

    def finished(self, prepared: PreparedBatch, records_N: Indices) -> SourceBatch:
        batch = super().finished(prepared, records_N).batch
        groups = {TARGETS: torch.from_numpy(self._groups_RML[records_N])}
        # The groups replace the residues, which are not predicted.
        batch = replace(batch, by_token={}, by_sequence=groups, target_positions=None)
        return SourceBatch(batch, records_N.size, batch.num_tokens)


def group_ids(names: Sequence[str], targets: NDArray | SparseTargets, levels: int) -> NDArray[np.int64]:
    """Return the group of each label of a record at each level, (R, M, L); IGNORED_TARGET if there is none.

    ``targets``: (R,) indices of ``names``, or sparse lists of them. A label is a.b.c at level 0, a.b at level 1.
    """
    # An extra label at the end stands for no label: it has no group at any level.
    ids_CL = level_ids([*names, ""], levels)
    if not isinstance(targets, SparseTargets):
        return ids_CL[np.where(targets < 0, len(names), targets)][:, None]
    counts_R = np.diff(targets.indptr)
    labels_RM = np.full((len(counts_R), max(1, int(counts_R.max(initial=0)))), len(names))
    labels_RM[np.arange(labels_RM.shape[1]) < counts_R[:, None]] = targets.indices
    return ids_CL[labels_RM]


def memberships(groups_RM: NDArray[np.int64], records_N: Indices, members: int) -> tuple[Indices, Groups]:
    """Return records and the group of each at one level, for planning steps.

    A record appears once per group, and once if it has none.
    """
    rows, columns = np.nonzero(groups_RM[records_N] >= 0)
    # Labels may share a group at a higher level.
    pairs = np.unique(np.stack([rows, groups_RM[records_N][rows, columns]]), axis=1)
    alone = np.setdiff1d(np.arange(records_N.size), rows)
    # Records without a group get ids of their own, which are negative.
    all_rows = np.concatenate([pairs[0], alone])
    return records_N[all_rows], Groups(np.concatenate([pairs[1], -1 - alone]), members)
