"""Function prediction as the training loop sees it: the classifier's experiment with terms for labels.

The network takes vectors in place of tokens, or trains a backbone. Its evaluation on vectors is the loss of the
held-out proteins, which stops it, and F1: metrics of each of thousands of terms belong to `function evaluate`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.dataset.batches.labelled import FeatureSource
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.function.proteins import LabelledTerms
from esmeray.function.vectors import VectorRows, read_vectors
from esmeray.model.task_model import TaskModel
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.classifier.experiment import ClassifierExperiment
from esmeray.tasks.classifier.export import export_vector_classifier
from esmeray.tasks.classifier.model import build_classifier
from esmeray.tasks.experiment import Engine, Experiment, TrainedState
from esmeray.tasks.terms.model import VectorClassifier, new_vector_classifier


class TermsExperiment(ClassifierExperiment):
    """A classifier of proteins' terms."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        super().open_data(path, context, run)
        terms = self.settings.model.terms
        self._on_vectors = terms.network == "vectors"
        if self._on_vectors:
            self.runs_backbone = False
            self._vectors = VectorRows(read_vectors(self.store, terms.embeddings))
            records = np.arange(len(self.store))
            source = FeatureSource(self._held_out, self._vectors, records, pooled=True)
            self._take(source, source)

    def opened(self, path: Path) -> LabelledTerms:
        return LabelledTerms(path, self.settings.data.terms.min_count)

    @classmethod
    def stage(cls, path: Path, stage_dir: Path) -> Path:
        """Terms and vectors are read into memory."""
        return path

    def open(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:
        if not self._on_vectors:
            super().open(model, context, control)

    def build_model(self) -> TaskModel:
        model, seed, labelled = self.settings.model, self.settings.seed, self._labelled
        weights_K = torch.from_numpy(labelled.label_weights)
        if not self._on_vectors:
            return build_classifier(model, seed, labelled.label_space, self._tokenizer, label_weights=weights_K)
        vectors_NC = torch.from_numpy(self._vectors.vectors_RC[labelled.training])
        share_K = torch.from_numpy(labelled.targets.shares(labelled.training)).float()
        return new_vector_classifier(model.classifier, seed, labelled.label_space, vectors_NC, share_K, weights_K)

    def evaluate(self, engine: Engine, control: ControlGroup, stop_requested: Callable[[], bool]) -> dict[str, float]:
        if not self._on_vectors:
            return super().evaluate(engine, control, stop_requested)
        return Experiment.evaluate(self, engine, control, stop_requested)

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        if trained.model.terms.network == "backbone":
            return super().export(trained, folder, overwrite=overwrite)
        channels = trained.weights["input_scale.mean"].numel()
        model = VectorClassifier(channels, trained.model.classifier, LabelSpace.load(trained.checkpoint.path))
        return export_vector_classifier(
            trained.put_into(model), folder, trained.resolved_config, trained.facts, overwrite=overwrite
        )
