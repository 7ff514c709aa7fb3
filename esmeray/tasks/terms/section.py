"""Settings of function prediction: the network, and the predictors that it is blended with."""

from typing import Literal

from pydantic import Field

from esmeray.function.section import EmbeddingsSection
from esmeray.train_config.section import Section

Part = Literal["naive", "homology", "neighbours", "network"]

_PARTS: list[Part] = ["naive", "homology", "neighbours", "network"]


class TermsSection(Section):
    """Function prediction: a network that learns terms, with the head, loss and patience of model.classifier, blended
    with other predictors."""

    network: Literal["vectors", "backbone"] = "vectors"
    """vectors: train only the head, on embeddings; backbone: train model.backbone as well, end to end or with LoRA."""
    parts: list[Part] = Field(default=_PARTS, min_length=1)
    """Predictors to blend. naive: frequency of terms; homology: terms of similar proteins, weighted by the sum of their
    bit scores; neighbours: terms of the nearest proteins in embedding space; network: this network."""
    embeddings: EmbeddingsSection = EmbeddingsSection()
