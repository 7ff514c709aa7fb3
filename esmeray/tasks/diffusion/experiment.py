"""The experiment of sequence diffusion."""

import json
from pathlib import Path

from esmeray.cluster.collective import WorkerContext
from esmeray.dataset.batches.preparation import count_cropped
from esmeray.dataset.store.format import SEQUENCES_FOLDER
from esmeray.dataset.store.reader import stage_once
from esmeray.dataset.structures.predictions import predictions_of
from esmeray.dataset.structures.store import StructureStore
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.tasks.diffusion.model import SequenceDiffusion
from esmeray.tasks.experiment import Experiment, RecordSet, TrainedState, exported

LABELS_FILE = "diffusion_labels.json"
"""Name of the file with the classes that sequences are conditioned on."""


class DiffusionExperiment(Experiment):
    """Sequence diffusion on a structure store."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        data, section = self.settings.data, self.settings.model.diffusion
        # The sequences that stage() copied; existing files are not copied again.
        sequences = path.absolute() / SEQUENCES_FOLDER
        staged = None if data.stage_dir is None else stage_once(sequences, Path(data.stage_dir))
        self._predictions = predictions_of(data)
        self._structures = structures = StructureStore(path, sequences=staged, predictions=self._predictions)
        self.store, self.checksum = structures.store, structures.manifest.checksum
        # The label embedding has a row per class: choosing a class requires the names in this order.
        self.names = {LABELS_FILE: json.dumps(structures.manifest.label_names).encode()}
        length = data.max_length
        training = StructureSource(structures, section, max_length=length, seed=self.settings.seed, training=True)
        # A fixed seed, so that metrics of different runs are comparable.
        held_out = StructureSource(structures, section, max_length=length, seed=0, training=False)
        # With predicted structures, the process that asks for them waits for them and counts hits: no loader processes.
        num_workers = 0 if self._predictions is not None else data.num_workers
        self.cropped = count_cropped(structures.store.lengths[structures.training], length)
        self.set_batches(
            RecordSet(training, structures.training),
            RecordSet(held_out, structures.validation),
            max_batches=self.settings.evaluation_batches,
            num_workers=num_workers,
        )

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        labels = tuple(json.loads((trained.checkpoint.path / LABELS_FILE).read_text(encoding="utf-8")))
        return exported(
            SequenceDiffusion.build(trained.model, trained.seed, labels), trained, folder, overwrite=overwrite
        )

    def build_model(self) -> SequenceDiffusion:
        return SequenceDiffusion.build(
            self.settings.model, self.settings.seed, tuple(self._structures.manifest.label_names)
        )

    @property
    def cache_hit_rate(self) -> float | None:
        return None if self._predictions is None else self._predictions.hit_rate
