"""Contrastive learning as the training loop sees it: steps, and held-out batches, of several members of a group."""

from pathlib import Path

import numpy as np

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.preparation import count_cropped
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.store.format import SEQUENCES_FOLDER
from esmeray.dataset.store.reader import stage_once
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.contrastive.data import GroupSource, group_ids, memberships
from esmeray.tasks.contrastive.model import ContrastiveModel
from esmeray.tasks.experiment import Experiment, TrainedState, exported


class ContrastiveExperiment(Experiment):
    """Contrastive learning on a labelled store of proteins."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        data, section = self.settings.data, self.settings.model.contrastive
        labelled = LabelledStore(path, stage_dir=None if data.stage_dir is None else Path(data.stage_dir))
        self.store, self.checksum = labelled.store, labelled.checksum
        groups_RML = group_ids(labelled.label_space.names, labelled.targets, len(section.level_weights))
        length, members = data.max_length, section.group_members
        records, groups = memberships(groups_RML[:, :, section.group_level], labelled.training, members)
        if np.unique(groups.ids).size == groups.ids.size:
            raise ConfigError(
                "model.contrastive.group_level: no two training records share a group, so there is nothing to learn"
            )
        # Side by side as well: relatives have to be in one batch, which is evaluated by itself.
        held_out, held_out_groups = memberships(groups_RML[:, :, section.group_level], labelled.validation, members)
        training = GroupSource(self.store, groups_RML, section, max_length=length, seed=self.settings.seed)
        fixed = GroupSource(self.store, groups_RML, section, max_length=length, seed=None)
        self.cropped = count_cropped(self.store.lengths[labelled.training], length)
        most = self.settings.evaluation_batches
        self.take(training, records, fixed, held_out, most, data.num_workers, (groups, held_out_groups))

    @classmethod
    def stage(cls, path: Path, stage_dir: Path) -> Path:
        """Copy the sequences, which the store then reads there; the labels are read into memory."""
        stage_once(path.absolute() / SEQUENCES_FOLDER, stage_dir)
        return path

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        return exported(ContrastiveModel.build(trained.model, trained.seed), trained, folder, overwrite=overwrite)

    def build_model(self) -> ContrastiveModel:
        return ContrastiveModel.build(self.settings.model, self.settings.seed)
