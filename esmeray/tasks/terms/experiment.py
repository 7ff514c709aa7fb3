"""The experiments of function prediction: terms as labels, of proteins or of one vector per protein.

On vectors, an evaluation computes the loss of the held-out proteins, for early stopping, and F1. Metrics per term, of
thousands of terms, are computed by `function evaluate`.
"""

from pathlib import Path

import numpy as np
import torch

from esmeray.cluster.collective import WorkerContext
from esmeray.dataset.batches.loader import FeatureSource
from esmeray.dataset.targets import LabelSpace
from esmeray.function.proteins import LabelledTerms
from esmeray.function.vectors import VectorRows, read_vectors
from esmeray.model.task_model import TaskModel
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.classifier.experiment import ClassifierExperiment, LabelledExperiment
from esmeray.tasks.classifier.model import build_classifier
from esmeray.tasks.experiment import TrainedState
from esmeray.tasks.section import ModelSection
from esmeray.tasks.terms.model import VectorClassifier, export_vector_classifier, new_vector_classifier


class _TermsExperiment(LabelledExperiment):
    """Annotated proteins, with their terms in memory."""

    _labelled: LabelledTerms

    def opened(self, path: Path) -> LabelledTerms:
        return LabelledTerms(path, self.settings.data.terms.min_count)

    @classmethod
    def stage(cls, path: Path, stage_dir: Path) -> Path:
        return path  # steps read no file


class BackboneExperiment(_TermsExperiment, ClassifierExperiment):
    """Train a backbone on the terms, as a classifier."""

    def build_model(self) -> TaskModel:
        model, labelled = self.settings.model, self._labelled
        weights_K = torch.from_numpy(labelled.label_weights)
        return build_classifier(
            model, self.settings.seed, labelled.label_space, self._tokenizer, label_weights=weights_K
        )


class VectorExperiment(_TermsExperiment):
    """Train only the head on the terms, from one vector per protein."""

    runs_backbone = False

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        super().open_data(path, context, run)
        self._vectors = VectorRows(read_vectors(self.store, self.settings.model.terms.embeddings))
        # Vectors are in the order of the records, so the record numbers are their keys.
        source = FeatureSource(self._held_out, self._vectors, np.arange(len(self.store)), pooled=True)
        # Replaces the batches of tokens, which the base class has set.
        self._set_batches_of(source, source)

    def build_model(self) -> TaskModel:
        labelled = self._labelled
        return new_vector_classifier(
            self.settings.model.classifier,
            self.settings.seed,
            labelled.label_space,
            torch.from_numpy(self._vectors.vectors_RC[labelled.training]),
            torch.from_numpy(labelled.shares).float(),
            torch.from_numpy(labelled.label_weights),
        )

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        # Read the size from the weights: the folder of the embeddings may no longer exist.
        channels = trained.weights["input_scale.mean"].numel()
        model = VectorClassifier(channels, trained.model.classifier, LabelSpace.load(trained.checkpoint.path))
        return export_vector_classifier(
            trained.put_into(model), folder, trained.resolved_config, trained.facts, overwrite=overwrite
        )


def experiment_of(model: ModelSection) -> type[LabelledExperiment]:
    """Return the experiment class for the settings."""
    return VectorExperiment if model.terms.network == "vectors" else BackboneExperiment
