"""The driver's side of a classifier: prepare and measure its data, and check the data against the model.

Imports neither torch nor transformers until the model is counted, so that error messages appear at once.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.alignment.similarity import identity_clusters
from esmeray.common.errors import CheckpointError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.dataset.batches.preparation import count_cropped, cropped_lengths
from esmeray.dataset.labels.conversion import ensure_labelled_store, labelled_store_location
from esmeray.dataset.labels.store import LabelledData, LabelledStore
from esmeray.dataset.labels.values import read_label_weights
from esmeray.dataset.section import TargetKind
from esmeray.dataset.tokens.base import SequenceTokenizer, load_tokenizer, open_tokenizer
from esmeray.dataset.tokens.token_store import ensure_tokens
from esmeray.model.backbones.source import source_type
from esmeray.model.cost.memory import count_parameters
from esmeray.model.heads.settings import best_metric, check_loss, check_pooling
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.run_folder.paths import TOKENIZER, RunFolder
from esmeray.tasks.plan import DataSize, TaskPlan, TaskSize, check_length
from esmeray.tasks.section import ModelSection


class ClassifierPlan(TaskPlan):
    """A classifier of labelled sequences."""

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        # Before the data is prepared, which may take hours.
        self.check_settings(self.data.labels.kind)
        labelled = LabelledStore(
            ensure_labelled_store(self.data, self.model.tokenizer, root, progress, identity_clusters)
        )
        if (weights := self.model.classifier.label_weights) is not None:
            read_label_weights(Path(weights), labelled.label_space)  # raises if the weights don't match the labels
        # Tokenize here, where progress is shown: workers find the tokens next to the store.
        ensure_tokens(labelled.store, tokenizer_of(self.model, labelled), labelled.path.parent, progress)
        return labelled.path

    def location(self, root: Path) -> Path:
        return labelled_store_location(self.data, self.model.tokenizer, root)

    def opened(self, path: Path) -> LabelledData:
        """Open the prepared data."""
        return LabelledStore(path)

    def checksum(self, path: Path) -> str:
        return self.opened(path).checksum

    def check_resumed(self, checkpoint: CheckpointFolder, path: Path) -> None:
        """Raise CheckpointError if the checkpoint was trained with another tokenizer."""
        before = open_tokenizer(checkpoint.path / TOKENIZER)
        # Compare the content: the hub name or folder may contain another tokenizer by now.
        if before.fingerprint != tokenizer_of(self.model, self.opened(path)).fingerprint:
            raise CheckpointError(
                f"model.backbone.source: {checkpoint.path} was trained with a different tokenizer than the one of "
                f"{self.model.backbone.source}: restore the tokenizer, or choose another run.name"
            )

    def write_names(self, run: RunFolder, path: Path) -> None:
        labelled = self.opened(path)
        # Remove leftover files of an earlier attempt's tokenizer: they would be read as part of this one.
        shutil.rmtree(run.tokenizer, ignore_errors=True)
        run.tokenizer.mkdir(parents=True)
        tokenizer_of(self.model, labelled).save(run.tokenizer)
        labelled.label_space.save(run.path)

    def check_settings(self, kind: TargetKind) -> None:
        """Raise an error if the config alone shows that targets of this kind are impossible."""
        section = self.model.classifier
        best_metric(section, kind)
        check_loss(section, kind)
        check_pooling(section, kind)
        source_type(self.model.backbone)  # raises for a missing source before its weights are read

    def measure(self, path: Path) -> TaskSize:
        labelled = self.opened(path)
        tokenizer = tokenizer_of(self.model, labelled)
        tokens = ensure_tokens(labelled.store, tokenizer, labelled.path.parent)
        special = len(tokenizer.prefix) + len(tokenizer.suffix)
        lengths_N = cropped_lengths(tokens.lengths, self.data.max_length) + special
        # No run uses the test part, so its lengths don't matter.
        judged_N = np.concatenate([labelled.training, labelled.validation])
        model = self.empty_model(labelled, tokenizer)
        if model.backbone is not None:
            check_length(self.data, model.backbone.longest, special, int(tokens.lengths[judged_N].max()))
        size = DataSize(
            labelled.training.size,
            int(lengths_N[labelled.training].sum()),
            count_cropped(tokens.lengths[labelled.training], self.data.max_length),
            exact=True,
            held_out=labelled.validation.size,
            counts=labelled.counts,
            labels=str(labelled.label_space),
            unknown=tokenizer.unknown_letters.report(map(labelled.store.text, range(len(labelled.store)))),
        )
        return TaskSize(size, count_parameters(model))

    def empty_model(self, labelled: LabelledData, tokenizer: SequenceTokenizer) -> Any:
        """Return the model without memory for its weights. Raises ConfigError if its parts don't fit together."""
        from esmeray.tasks.classifier.model import build_classifier  # here: it loads torch

        return build_classifier(self.model, 0, labelled.label_space, tokenizer, empty=True)


def tokenizer_of(model: ModelSection, labelled: LabelledData) -> SequenceTokenizer:
    """Return the config's tokenizer. A tokenizer trained on the labelled store is saved next to it."""
    path, section = labelled.path, model.tokenizer
    # Next to the data and named after its size, so that runs on the same data share it.
    trained = path.with_name(f"{path.name}-tokenizer-{section.vocabulary_size}")
    return load_tokenizer(
        section,
        model.backbone.source,
        # A function, since the texts are only read if a tokenizer must be trained.
        lambda: [labelled.store.text(index) for index in labelled.training.tolist()],
        trained,
    )
