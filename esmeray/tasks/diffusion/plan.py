"""The driver's side of sequence diffusion: a structure store and the size of the model."""

from pathlib import Path

from esmeray.common.errors import ConfigError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.dataset.structures.conversion import ensure_structure_store, structure_store_location
from esmeray.dataset.structures.predictions import predictions_of
from esmeray.dataset.structures.store import StructureStore
from esmeray.model.cost.memory import ParameterCount, count_parameters
from esmeray.tasks.plan import TaskPlan, TaskSize, size_of_lengths


class DiffusionPlan(TaskPlan):
    """Sequence diffusion."""

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        self._parameters(0)  # raises for an impossible model before the data is read
        path = ensure_structure_store(self.data, root, progress)
        predictions = predictions_of(self.data)
        if predictions is not None:
            structures = StructureStore(path)
            predictions.check(structures.store.sequence_keys(structures.unknown_records))
        # Measured structures have confidence 100: the threshold would silently have no effect.
        threshold = self.model.diffusion.min_confidence
        if threshold and predictions is None and not StructureStore(path).manifest.counts.predicted:
            raise ConfigError(
                f"model.diffusion.min_confidence {threshold:g}: no structure has a confidence; if they are "
                "predictions, set data.structures.predicted to true, otherwise remove min_confidence"
            )
        return path

    def location(self, root: Path) -> Path:
        return structure_store_location(self.data, root)

    def checksum(self, path: Path) -> str:
        return StructureStore(path).manifest.checksum

    def measure(self, path: Path) -> TaskSize:
        structures = StructureStore(path)
        size = size_of_lengths(
            structures.store.lengths[structures.training],
            self.data,
            held_out=structures.validation.size,
            counts=structures.manifest.counts,
        )
        return TaskSize(size, self._parameters(len(structures.manifest.label_names)))

    def _parameters(self, num_labels: int) -> ParameterCount:
        from esmeray.tasks.diffusion.model import SequenceDiffusion  # here: it loads torch

        return count_parameters(SequenceDiffusion.build(self.model, 0, tuple(map(str, range(num_labels))), empty=True))
