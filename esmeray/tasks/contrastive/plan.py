"""The driver's side of contrastive learning: a labelled store and the size of the model."""

from pathlib import Path

from esmeray.alignment.similarity import identity_clusters
from esmeray.common.errors import ConfigError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.dataset.labels.conversion import ensure_labelled_store, labelled_store_location
from esmeray.dataset.labels.store import LabelledStore
from esmeray.tasks.plan import ResiduePlan, TaskPlan, TaskSize, size_of_lengths

_KINDS = ("multiclass", "multilabel")


class ContrastivePlan(ResiduePlan):
    """Contrastive learning of labelled proteins."""

    in_process = True

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        # Before the data is prepared, which may take long.
        if self.data.labels.kind not in _KINDS or self.model.tokenizer.content == "text":
            raise ConfigError(
                f"data.labels.kind {self.data.labels.kind}, model.tokenizer.content "
                f"{self.model.tokenizer.content}: contrastive learning needs proteins (content protein) with "
                f"groups (kind {' or '.join(_KINDS)})"
            )
        self._model()
        return ensure_labelled_store(self.data, self.model.tokenizer, root, progress, identity_clusters)

    def location(self, root: Path) -> Path:
        return labelled_store_location(self.data, self.model.tokenizer, root)

    def checksum(self, path: Path) -> str:
        return LabelledStore(path).checksum

    def measure(self, path: Path) -> TaskSize:
        labelled = LabelledStore(path)
        size = size_of_lengths(
            labelled.store.lengths[labelled.training],
            self.data,
            held_out=labelled.validation.size,
            counts=labelled.counts,
            labels=str(labelled.label_space),
        )
        return self._checked(size, labelled.store)

    # Not estimated from the head of the sources, which has no labels: all data is prepared in a temporary folder.
    estimate = TaskPlan.estimate
