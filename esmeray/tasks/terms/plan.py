"""The driver's side of function prediction: annotated proteins, and the network that learns their terms."""

from pathlib import Path
from typing import Any

from esmeray.common.errors import ConfigError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.dataset.embeddings.manifest import read_manifest
from esmeray.dataset.labels.store import LabelledData
from esmeray.dataset.section import TargetKind
from esmeray.dataset.tokens.base import SequenceTokenizer
from esmeray.dataset.tokens.token_store import ensure_tokens
from esmeray.function.proteins import LabelledTerms, location, prepare
from esmeray.function.section import COMPOSITION
from esmeray.function.vectors import CHANNELS
from esmeray.model.section import BackboneSection
from esmeray.tasks.classifier.plan import ClassifierPlan, tokenizer_of


class TermsPlan(ClassifierPlan):
    """A classifier whose labels are the terms of an ontology."""

    in_process = True

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        self.check_settings("multilabel")
        path = prepare(self.data, root, progress)
        labelled = self.opened(path)
        ensure_tokens(labelled.store, tokenizer_of(self.model, labelled), root, progress)
        return path

    def location(self, root: Path) -> Path:
        return location(self.data, root)

    def opened(self, path: Path) -> LabelledTerms:
        return LabelledTerms(path, self.data.terms.min_count)

    def check_settings(self, kind: TargetKind) -> None:
        super().check_settings(kind)
        model = self.model
        if model.terms.network == "vectors" and model.classifier.pooling == "light_attention":
            raise ConfigError("model.classifier.pooling light_attention: vectors can't be pooled; leave it at mean")

    @property
    def padded(self) -> bool:
        return self.model.terms.network == "backbone" and super().padded

    @property
    def trains_adapters(self) -> bool:
        return self.model.terms.network == "backbone"

    def empty_model(self, labelled: LabelledData, tokenizer: SequenceTokenizer) -> Any:
        terms = self.model.terms
        if terms.network == "backbone":
            return super().empty_model(labelled, tokenizer)
        # Imported here, since they load torch: errors in the settings appear faster.
        from esmeray.model.backbones.base import empty_weights
        from esmeray.model.backbones.loading import build_backbone
        from esmeray.tasks.terms.model import VectorClassifier

        embeddings = terms.embeddings
        channels = CHANNELS
        if embeddings.store is not None:
            channels = read_manifest(Path(embeddings.store)).outputs["mean"].channels
        elif embeddings.model != COMPOSITION:  # a dry run: the vectors are computed before training
            channels = build_backbone(BackboneSection(source=embeddings.model), 0, empty=True).hidden_size
        with empty_weights():
            return VectorClassifier(channels, self.model.classifier, labelled.label_space)
