"""The experiment of contrastive learning: steps and held-out batches contain several members of a group.

Shape legend: R records, N sequences of a batch, M maximum number of labels of a record, L levels.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.loader import Indices, ResidueSource, SourceBatch
from esmeray.dataset.batches.plan import Groups
from esmeray.dataset.batches.preparation import PreparationSettings, PreparedBatch, count_cropped
from esmeray.dataset.labels.label_space import level_ids
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.packed_batch import TARGETS
from esmeray.dataset.store.reader import Store
from esmeray.dataset.targets import SparseTargets
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.contrastive.model import ContrastiveModel
from esmeray.tasks.experiment import RecordSet, ResidueExperiment


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


class ContrastiveExperiment(ResidueExperiment):
    """Contrastive learning on a labelled store of proteins."""

    new_model = staticmethod(ContrastiveModel.build)

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        data = self.settings.data
        section = self.settings.model.contrastive
        labelled = LabelledStore(path, stage_dir=None if data.stage_dir is None else Path(data.stage_dir))
        self.store = labelled.store
        self.checksum = labelled.checksum
        groups_RML = group_ids(labelled.label_space.names, labelled.targets, len(section.level_weights))
        by_level = partial(memberships, groups_RML[:, :, section.group_level], members=section.group_members)
        records, groups = by_level(labelled.training)
        if np.unique(groups.ids).size == groups.ids.size:
            raise ConfigError(
                "model.contrastive.group_level: no two training records are in the same group, so there is "
                "nothing to learn"
            )
        # Grouped as well: relatives must be in one batch, since each held-out batch is evaluated by itself.
        held_out, held_out_groups = by_level(labelled.validation)
        cropped = PreparationSettings(data.max_length, self.settings.seed, random_crops=True, masking=None)
        # Held-out batches don't depend on the run's seed, so that metrics of different runs are comparable.
        fixed = PreparationSettings(data.max_length, 0, random_crops=False, masking=None)
        training, validation = (GroupSource(self.store, settings, groups_RML) for settings in (cropped, fixed))
        self.cropped = count_cropped(self.store.lengths[labelled.training], data.max_length)
        self.set_batches(
            RecordSet(training, records, groups),
            RecordSet(validation, held_out, held_out_groups),
            max_batches=self.settings.evaluation_batches,
            num_workers=data.num_workers,
        )


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
