"""Contrastive learning as the training loop sees it: steps that hold several members of a group.

The evaluation compares all held-out sequences with each other, those of all workers together.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.preparation import count_cropped
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.store.format import SEQUENCES_FOLDER
from esmeray.dataset.store.reader import stage_once
from esmeray.model.task_model import TaskOutput
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.contrastive.data import GroupSource, group_ids, memberships
from esmeray.tasks.contrastive.model import ContrastiveModel, contrastive_losses, sharing
from esmeray.tasks.experiment import Engine, Experiment, TrainedState, exported


class ContrastiveExperiment(Experiment):
    """Contrastive learning on a labelled store of proteins."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        data, section = self.settings.data, self.settings.model.contrastive
        labelled = LabelledStore(path, stage_dir=None if data.stage_dir is None else Path(data.stage_dir))
        self.store, self.checksum = labelled.store, labelled.checksum
        names, length = labelled.label_space.names, data.max_length
        groups_RML = group_ids(names, labelled.targets, len(section.level_weights))
        groups_RM = groups_RML[:, :, section.group_level]
        if not sharing_records(groups_RM[labelled.training]):
            raise ConfigError(
                "model.contrastive.group_level: no two training records share a group, so there is nothing to learn"
            )
        records, groups = memberships(groups_RM, labelled.training, section.group_members)
        training = GroupSource(self.store, groups_RML, section, max_length=length, seed=self.settings.seed)
        held_out = GroupSource(self.store, groups_RML, section, max_length=length, seed=None)
        self.cropped = count_cropped(self.store.lengths[labelled.training], length)
        max_batches = self.settings.evaluation_batches
        self.take(training, records, held_out, labelled.validation, max_batches, data.num_workers, groups)

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

    def evaluate(self, engine: Engine, control: ControlGroup, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """``loss`` of the held-out sequences among each other, and ``neighbour_accuracy`` of each level."""
        model = engine.module
        assert isinstance(model, ContrastiveModel)
        vectors: list[Tensor] = []
        groups: list[Tensor] = []
        records: list[Tensor] = []

        def keep(batch: PackedBatch) -> TaskOutput:
            count = batch.records.numel()  # fillers come last
            vectors.append(model.vectors(batch)[:count].cpu())
            groups.append(batch.targets[:count].cpu())
            records.append(batch.records.cpu())
            number = torch.tensor(count)
            return TaskOutput(torch.zeros(()), number, {"targets": number.double().to(engine.device)})

        if not self.held_out_sums(engine, control, stop_requested, keep):
            return {}
        vectors_ND, groups_NML, records_N = (
            control.gather_rows(torch.cat(rows)) for rows in (vectors, groups, records)
        )
        metrics: dict[str, float] = {}
        # One worker's for all: sums in another order would differ in the last digits.
        if control.rank == 0:
            losses_N = contrastive_losses(vectors_ND, groups_NML, records_N, model.section)
            metrics = {"loss": float(losses_N.double().mean())} | neighbour_accuracies(vectors_ND, groups_NML)
        return control.from_rank_0(metrics)


def sharing_records(groups_RM: NDArray[np.int64]) -> bool:
    """Test for a group of two records."""
    known = np.unique(groups_RM[groups_RM >= 0], return_counts=True)[1]
    return bool((known > 1).any())


def neighbour_accuracies(vectors_ND: Tensor, groups_NML: Tensor) -> dict[str, float]:
    """Of each level the share of sequences whose nearest other one shares their group, among those that have such."""
    similarities_NN = (vectors_ND @ vectors_ND.T).fill_diagonal_(-torch.inf)
    nearest_N = similarities_NN.argmax(1)
    accuracies = {}
    for level in range(groups_NML.shape[2]):
        is_shared_NN = sharing(groups_NML[:, :, level]).fill_diagonal_(False)
        has_relative_N = is_shared_NN.any(1)
        if has_relative_N.any():
            is_right_N = is_shared_NN.gather(1, nearest_N[:, None])[:, 0][has_relative_N]
            name = "neighbour_accuracy" + (f"_level_{level}" if level else "")
            accuracies[name] = float(is_right_N.double().mean())
    return accuracies
