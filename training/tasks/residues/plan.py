"""Tasks that learn from residues alone, before training: a store, and the size of a backbone with its head."""

from __future__ import annotations

from pathlib import Path

from common.progress import ProgressCallback
from dataset.store.conversion import ensure_store, store_location
from dataset.store.reader import Store
from model.backbones.source import is_padded, source_type
from model.cost.memory import count_parameters
from training.tasks.data_size import estimate_size, size_of_store
from training.tasks.plan import TaskPlan, TaskSize


class ResiduePlan(TaskPlan):
    """The autoencoder or the masked language model."""

    def prepare(self, root: Path, progress: ProgressCallback | None = None) -> Path:
        """Convert the sources to a store."""
        section = self.config.model.backbone
        count_parameters(self.config.model)  # refuses an impossible model before the data is read
        self.check_stage(padded=is_padded(section, source_type(section)))
        return ensure_store(self.config.data, root, progress)

    def location(self, root: Path) -> Path:
        """Return the store's folder."""
        return store_location(self.config.data, root)

    def checksum(self, path: Path) -> str:
        """Return the store's checksum."""
        return Store(path).checksum

    def measure(self, path: Path) -> TaskSize:
        """Count the training part of the store."""
        return TaskSize(size_of_store(Store(path), self.config.data), count_parameters(self.config.model))

    def estimate(self) -> TaskSize:
        """Read the head of the sources."""
        return TaskSize(estimate_size(self.config.data), count_parameters(self.config.model))
