"""The experiment of contrastive learning: steps and held-out batches contain several members of a group."""

from functools import partial
from pathlib import Path

import numpy as np

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.preparation import PreparationSettings, count_cropped
from esmeray.dataset.labels.store import LabelledStore
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.contrastive.data import GroupSource, group_ids, memberships
from esmeray.tasks.contrastive.model import ContrastiveModel
from esmeray.tasks.experiment import RecordSet, ResidueExperiment


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
        most = self.settings.evaluation_batches
        self.set_batches(
            RecordSet(training, records, groups),
            RecordSet(validation, held_out, held_out_groups),
            max_batches=most,
            num_workers=data.num_workers,
        )
