"""The data of a classifier before training: prepared, counted, and held against the model that is to take it.

Imports neither torch nor transformers, so that a plan and a refusal are there at once.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.dataset.batches.preparation import count_cropped, cropped_lengths
from esmeray.dataset.labels.conversion import ensure_labelled_store, labelled_store_location
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.labels.values import read_label_weights
from esmeray.dataset.section import TargetKind
from esmeray.dataset.tokens.base import SequenceTokenizer, load_tokenizer, open_tokenizer
from esmeray.dataset.tokens.token_store import ensure_tokens
from esmeray.model.backbones.facts import BackboneFacts, backbone_facts, check_not_frozen, chosen_layers
from esmeray.model.backbones.source import check_source
from esmeray.model.cost.memory import ParameterCount
from esmeray.model.heads.settings import best_metric, check_pooling, loss_name
from esmeray.model.section import ClassifierSection
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.run_folder.paths import TOKENIZER, RunFolder
from esmeray.tasks.plan import DataSize, TaskPlan, TaskSize
from esmeray.tasks.section import ModelSection

if TYPE_CHECKING:
    from esmeray.function.proteins import LabelledTerms  # SciPy's matrices, which a plan of labels needs none of

LabelledData: TypeAlias = "LabelledStore | LabelledTerms"
"""What a classifier learns from: records with labels, or proteins with terms of an ontology."""


class ClassifierPlan(TaskPlan):
    """A classifier of labelled sequences."""

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        self.check_settings(self.data.labels.kind)
        labelled = LabelledStore(ensure_labelled_store(self.data, self.model.tokenizer, root, progress))
        if (weights := self.model.classifier.label_weights) is not None:
            read_label_weights(Path(weights), labelled.label_space)  # refuses those that do not go with its labels
        ensure_tokens(labelled.store, tokenizer_of(self.model, labelled), labelled.path.parent, progress)
        return labelled.path

    def location(self, root: Path) -> Path:
        return labelled_store_location(self.data, self.model.tokenizer, root)

    def opened(self, path: Path) -> LabelledData:
        """The prepared data."""
        return LabelledStore(path)

    def checksum(self, path: Path) -> str:
        return self.opened(path).checksum

    def check_resumed(self, checkpoint: CheckpointFolder, path: Path) -> None:
        """Refuse another tokenizer than the checkpoint was trained with."""
        now = tokenizer_of(self.model, self.opened(path))
        if open_tokenizer(checkpoint.path / TOKENIZER).fingerprint != now.fingerprint:
            raise CheckpointError(
                f"model.tokenizer: {checkpoint.path} was trained with another tokenizer than that of "
                f"{self.model.backbone.source} and model.tokenizer: restore it, or choose another run.name"
            )

    def write_names(self, run: RunFolder, path: Path) -> None:
        labelled = self.opened(path)
        shutil.rmtree(run.tokenizer, ignore_errors=True)
        run.tokenizer.mkdir(parents=True)
        tokenizer_of(self.model, labelled).save(run.tokenizer)
        labelled.label_space.save(run.path)

    def check_settings(self, kind: TargetKind) -> None:
        """Refuse what the config alone shows to be impossible for targets of this kind."""
        section = self.model.classifier
        best_metric(section, kind)
        loss_name(section, kind)
        check_pooling(section, kind)
        check_source(self.model.backbone)

    def measure(self, path: Path) -> TaskSize:
        labelled = self.opened(path)
        tokenizer = tokenizer_of(self.model, labelled)
        tokens = ensure_tokens(labelled.store, tokenizer, labelled.path.parent)
        special = len(tokenizer.prefix) + len(tokenizer.suffix)
        lengths_N = cropped_lengths(tokens.lengths, self.data.max_length) + special
        judged_N = np.concatenate([labelled.training, labelled.validation])
        facts = self.facts(tokenizer)
        if facts.longest is not None and (longest := int(lengths_N[judged_N].max())) > facts.longest:
            raise ConfigError(
                f"data.max_length: the longest sequence has {longest} tokens, and this backbone takes {facts.longest}: "
                f"set it to at most {facts.longest - special}"
            )
        size = DataSize(
            labelled.training.size,
            int(lengths_N[labelled.training].sum()),
            count_cropped(tokens.lengths[labelled.training], self.data.max_length),
            exact=True,
            held_out=labelled.validation.size,
            counts=labelled.counts,
            labels=str(labelled.label_space),
        )
        return TaskSize(
            size, count_classifier_parameters(self.model, facts, labelled.label_space, len(tokenizer.prefix))
        )

    def facts(self, tokenizer: SequenceTokenizer) -> BackboneFacts:
        """What is known of the backbone before it is built."""
        return backbone_facts(self.model.backbone, tokenizer.vocabulary_size, tokenizer.pad)


def tokenizer_of(model: ModelSection, labelled: LabelledData) -> SequenceTokenizer:
    """The config's tokenizer; one that is trained on the labelled store is saved beside it."""
    path, section = labelled.path, model.tokenizer
    trained = path.with_name(f"{path.name}-tokenizer-{section.vocabulary_size}")
    return load_tokenizer(
        section,
        model.backbone.source,
        lambda: [labelled.store.text(index) for index in labelled.training.tolist()],
        trained,
    )


def count_classifier_parameters(
    section: ModelSection, facts: BackboneFacts, label_space: LabelSpace, num_prefix: int
) -> ParameterCount:
    """Parameters of a classifier. Raises ConfigError where its head or adapter does not go with the rest."""
    classifier = section.classifier
    lora = section.backbone.lora
    # Counted before anything is loaded: what does not go together is refused here, and not after a download.
    loss_name(classifier, label_space.kind)
    check_pooling(classifier, label_space.kind, num_prefix=num_prefix, causal=facts.causal)
    head = _head_parameters(classifier, facts.hidden_size, label_space.num_outputs)
    if lora.rank:
        check_not_frozen(section.backbone.frozen)
        chosen = chosen_layers(list(facts.linear), lora.targets)
        # Two matrices a layer, of rank rows each; nothing else of the backbone is trained.
        adapter = lora.rank * sum(sum(facts.linear[name]) for name in chosen)
        return ParameterCount(facts.parameters + adapter + head, adapter + head, adapter)
    if section.backbone.frozen:
        return ParameterCount(facts.parameters + head, head, 0)
    matrices = sum(inputs * outputs for inputs, outputs in facts.linear.values())
    return ParameterCount(facts.parameters + head, facts.parameters - facts.unused + head, matrices)


def _head_parameters(section: ClassifierSection, channels: int, outputs: int) -> int:
    count = 0
    attentive = section.pooling == "light_attention"
    if attentive:  # two convolutions
        count += 2 * (channels * channels * section.light_attention_kernel + channels)
        channels *= 2
    if section.head == "mlp":  # the hidden layer, and the norm after light attention
        count += (channels + 1 + 2 * attentive) * section.hidden_size
        channels = section.hidden_size
    return count + (channels + 1) * outputs
