"""Function prediction as the training loop sees it: the classifier's experiment with terms for labels.

The network takes vectors in place of tokens, or trains a backbone. Its evaluation on vectors is the loss of the
held-out proteins, which stops it, and F1: metrics of each of thousands of terms belong to `function evaluate`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from esmeray.dataset.batches.labelled import FeatureSource
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.function.proteins import LabelledTerms
from esmeray.function.vectors import VectorRows, read_vectors
from esmeray.model.export.classifier import export_vector_classifier
from esmeray.model.tasks.base import TaskModel
from esmeray.model.tasks.classifier import build_classifier
from esmeray.model.tasks.terms import VectorClassifier, new_vector_classifier
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.loading import dump_config
from esmeray.training.engine.collective import ControlGroup, WorkerContext
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.tasks.classifier.experiment import ClassifierExperiment
from esmeray.training.tasks.experiment import Experiment, TrainedState


class TermsExperiment(ClassifierExperiment):
    """A classifier of proteins' terms."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        super().open_data(path, context, run)
        terms = self.model_section.terms
        self._on_vectors = terms.network == "vectors"
        if self._on_vectors:
            self.runs_backbone = False
            self._vectors = VectorRows(read_vectors(self.store, terms.embeddings))
            records = np.arange(len(self.store))
            source = FeatureSource(self._held_out, self._vectors, records, pooled=True)
            self._take(source, source)

    def opened(self, path: Path) -> LabelledTerms:
        return LabelledTerms(path, self.data.terms.min_count)

    @classmethod
    def stage(cls, path: Path, stage_dir: Path) -> Path:
        """Terms and vectors are read into memory."""
        return path

    def open(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:
        if not self._on_vectors:
            super().open(model, context, control)

    def build_model(self) -> TaskModel:
        model, seed, labelled = self.model_section, self.seed, self._labelled
        weights_K = torch.from_numpy(labelled.label_weights)
        if not self._on_vectors:
            return build_classifier(model, seed, labelled.label_space, self._tokenizer, label_weights=weights_K)
        vectors_NC = torch.from_numpy(self._vectors.vectors_RC[labelled.training])
        share_K = torch.from_numpy(labelled.targets.shares(labelled.training)).float()
        return new_vector_classifier(model.classifier, seed, labelled.label_space, vectors_NC, share_K, weights_K)

    def evaluate(
        self, engine: TrainingEngine, control: ControlGroup, stop_requested: Callable[[], bool]
    ) -> dict[str, float]:
        if not self._on_vectors:
            return super().evaluate(engine, control, stop_requested)
        return Experiment.evaluate(self, engine, control, stop_requested)

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        config = trained.checkpoint.config()
        if config.model.terms.network == "backbone":
            return super().export(trained, folder, overwrite=overwrite)
        channels = trained.weights["input_scale.mean"].numel()
        model = VectorClassifier(channels, config.model.classifier, LabelSpace.load(trained.checkpoint.path))
        return export_vector_classifier(
            trained.put_into(model), folder, dump_config(config), trained.facts, overwrite=overwrite
        )
