"""Tasks that learn from the residues of a store alone, as the training loop sees them."""

from abc import abstractmethod
from pathlib import Path

from dataset.batches.loader import Loader, ResidueSource
from dataset.batches.preparation import PreparationSettings
from dataset.batches.splitting import split_records
from dataset.store.reader import Store
from model.backbones.loading import residue_tokenizer
from model.export.backbone import export
from model.tasks.base import ResidueModel
from run_folder.paths import RunFolder
from train_config.loading import dump_config
from train_config.schema import MaskedLMSection, ModelSection
from training.engine.collective import WorkerContext
from training.tasks.experiment import Experiment, TrainedState


class ResidueExperiment(Experiment):
    """A task on a store of residues."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        self.store = store = Store(path)
        self.checksum = store.checksum
        training, held_out = split_records(store.sequence_hashes, self.data.validation_share)
        length, masking = self.data.max_length, self.masking(self.model_section)
        source = ResidueSource(store, PreparationSettings(length, self.seed, random_crops=True, masking=masking))
        # Held-out batches depend on no run's seed, so that metrics of runs compare.
        fixed = ResidueSource(store, PreparationSettings(length, 0, random_crops=False, masking=masking))
        self.cropped = source.count_cropped(training)
        loader = Loader(source, self.data.num_workers, self.data.prefetch)
        self.take(loader, training, fixed, held_out, self.training.evaluation_batches)

    @staticmethod
    @abstractmethod
    def new_model(section: ModelSection, seed: int) -> ResidueModel:
        """Return the model to train, in fp32 on the CPU."""

    @staticmethod
    def masking(section: ModelSection) -> MaskedLMSection | None:
        """Return the share to mask; None where every residue is its own target."""
        return None

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        config = trained.checkpoint.config()
        return exported(cls.new_model(config.model, config.run.seed), trained, folder, overwrite=overwrite)

    def build_model(self) -> ResidueModel:
        return self.new_model(self.model_section, self.seed)


def exported(model: ResidueModel, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
    """Put the weights of a checkpoint into the model of its config and export it; see :meth:`Experiment.export`."""
    config = trained.checkpoint.config()
    return export(
        trained.put_into(model),
        folder,
        residue_tokenizer(config.model.backbone),
        resolved_config=dump_config(config),
        model_card_facts=trained.facts,
        overwrite=overwrite,
    )
