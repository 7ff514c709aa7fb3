"""Sequence diffusion before training: a structure store, and the size of the model."""

from __future__ import annotations

from pathlib import Path

from common.progress import ProgressCallback
from dataset.batches.cropping import count_cropped, cropped_lengths
from dataset.structures.conversion import ensure_structure_store, structure_store_location
from dataset.structures.predictions import predictions_of
from dataset.structures.store import StructureStore
from model.backbones.source import is_padded, source_type
from model.cost.memory import ParameterCount, count_diffusion_parameters
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE
from training.tasks.plan import DataSize, TaskPlan, TaskSize


class DiffusionPlan(TaskPlan):
    """Sequence diffusion."""

    def prepare(self, root: Path, progress: ProgressCallback | None = None) -> Path:
        self._parameters(0)  # refuses an impossible model before the data is read
        path = ensure_structure_store(self.config.data, root, progress)
        predictions = predictions_of(self.config.data)
        if predictions is not None:
            structures = StructureStore(path)
            predictions.check(structures.store.sequence_hashes[structures.unknown_records])
        return path

    def location(self, root: Path) -> Path:
        return structure_store_location(self.config.data, root)

    def checksum(self, path: Path) -> str:
        return StructureStore(path).manifest.checksum

    def measure(self, path: Path) -> TaskSize:
        structures = StructureStore(path)
        lengths_N = structures.store.lengths[structures.training]
        cropped = count_cropped(lengths_N, self.config.data.max_length)
        kept_N = cropped_lengths(lengths_N, self.config.data.max_length)
        size = DataSize(
            lengths_N.size,
            int((kept_N + SPECIAL_TOKENS_PER_SEQUENCE).sum()),
            cropped.sequences,
            cropped.residues,
            exact=True,
            held_out=structures.validation.size,
        )
        return TaskSize(size, self._parameters(len(structures.manifest.label_names)))

    def estimate(self) -> TaskSize:
        """Prepare the data in a folder that is thrown away: chains are known once files are read."""
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            return self.measure(self.prepare(Path(folder)))

    def _parameters(self, num_labels: int) -> ParameterCount:
        section = self.config.model.backbone
        self.check_stage(padded=is_padded(section, source_type(section)))
        return count_diffusion_parameters(self.config.model, num_labels)
