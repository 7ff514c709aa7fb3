"""The data of a classifier before training: prepared, counted, and held against the model that is to take it.

Imports neither torch nor transformers, so that a plan and a refusal are there at once.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.dataset.batches.preparation import count_cropped, cropped_lengths
from esmeray.dataset.labels.conversion import ensure_labelled_store, labelled_store_location
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.labels.values import read_label_weights
from esmeray.dataset.tokens.base import SequenceTokenizer, load_tokenizer, open_tokenizer
from esmeray.dataset.tokens.token_store import ensure_tokens
from esmeray.model.backbones.facts import BackboneFacts, backbone_facts
from esmeray.model.backbones.source import check_source
from esmeray.model.cost.memory import count_classifier_parameters
from esmeray.model.tasks.classifier_settings import best_metric, check_pooling, loss_name
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.run_folder.paths import TOKENIZER, RunFolder
from esmeray.train_config.classifier_schema import TargetKind
from esmeray.train_config.schema import ModelSection
from esmeray.training.tasks.plan import DataSize, TaskPlan, TaskSize


class ClassifierPlan(TaskPlan):
    """A classifier of labelled sequences."""

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        config = self.config
        self.check_settings(config.data.labels.kind)
        labelled = LabelledStore(ensure_labelled_store(config.data, config.model.tokenizer, root, progress))
        if (weights := config.model.classifier.label_weights) is not None:
            read_label_weights(Path(weights), labelled.label_space)  # refuses those that do not go with its labels
        ensure_tokens(labelled.store, tokenizer_of(config.model, labelled), labelled.path.parent, progress)
        return labelled.path

    def location(self, root: Path) -> Path:
        return labelled_store_location(self.config.data, self.config.model.tokenizer, root)

    def opened(self, path: Path) -> Any:
        """The prepared data: a LabelledStore, or what reads like one."""
        return LabelledStore(path)

    def checksum(self, path: Path) -> str:
        return self.opened(path).checksum

    def check_resumed(self, checkpoint: CheckpointFolder, path: Path) -> None:
        """Refuse another tokenizer than the checkpoint was trained with."""
        now = tokenizer_of(self.config.model, self.opened(path))
        if open_tokenizer(checkpoint.path / TOKENIZER).fingerprint != now.fingerprint:
            raise CheckpointError(
                f"model.tokenizer: the run {self.config.run.name} was trained with another tokenizer than that of "
                f"{self.config.model.backbone.source} and model.tokenizer: restore it, or choose another run.name"
            )

    def write_names(self, run: RunFolder, path: Path) -> None:
        labelled = self.opened(path)
        shutil.rmtree(run.tokenizer, ignore_errors=True)
        run.tokenizer.mkdir(parents=True)
        tokenizer_of(self.config.model, labelled).save(run.tokenizer)
        labelled.label_space.save(run.path)

    def check_settings(self, kind: TargetKind) -> None:
        """Refuse what the config alone shows to be impossible for targets of this kind."""
        section = self.config.model.classifier
        best_metric(section, kind)
        loss_name(section, kind)
        check_pooling(section, kind)
        check_source(self.config.model.backbone)

    def measure(self, path: Path) -> TaskSize:
        config, labelled = self.config, self.opened(path)
        tokenizer = tokenizer_of(config.model, labelled)
        tokens = ensure_tokens(labelled.store, tokenizer, labelled.path.parent)
        special = len(tokenizer.prefix) + len(tokenizer.suffix)
        lengths_N = cropped_lengths(tokens.lengths, config.data.max_length) + special
        judged_N = np.concatenate([labelled.training, labelled.validation])
        facts = self.facts(tokenizer)
        if facts.longest is not None and (longest := int(lengths_N[judged_N].max())) > facts.longest:
            raise ConfigError(
                f"data.max_length: the longest sequence has {longest} tokens, and this backbone takes {facts.longest}: "
                f"set it to at most {facts.longest - special}"
            )
        self.check_stage(padded=facts.padded)
        size = DataSize(
            labelled.training.size,
            int(lengths_N[labelled.training].sum()),
            count_cropped(tokens.lengths[labelled.training], config.data.max_length),
            exact=True,
            held_out=labelled.validation.size,
            counts=labelled.counts,
            labels=str(labelled.label_space),
        )
        return TaskSize(
            size, count_classifier_parameters(config.model, facts, labelled.label_space, len(tokenizer.prefix))
        )

    def facts(self, tokenizer: SequenceTokenizer) -> BackboneFacts:
        """What is known of the backbone before it is built."""
        return backbone_facts(self.config.model.backbone, tokenizer.vocabulary_size, tokenizer.pad)


def tokenizer_of(model: ModelSection, labelled: Any) -> SequenceTokenizer:
    """The config's tokenizer; one that is trained on the labelled store is saved beside it."""
    path, section = labelled.path, model.tokenizer
    trained = path.with_name(f"{path.name}-tokenizer-{section.vocabulary_size}")
    return load_tokenizer(
        section,
        model.backbone.source,
        lambda: [labelled.store.text(index) for index in labelled.training.tolist()],
        trained,
    )
