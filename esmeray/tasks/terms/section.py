"""Settings of function prediction: the network, and the predictors that it is blended with."""

from typing import Literal

from pydantic import Field

from esmeray.function.section import EmbeddingsSection
from esmeray.train_config.section import PositiveFloat, PositiveInt, Section

Part = Literal["naive", "homology", "neighbours", "network"]

_PARTS: list[Part] = ["naive", "homology", "neighbours", "network"]


class HomologySection(Section):
    """Predict terms from similar proteins, weighted by the sum of their bit scores."""

    candidates: PositiveInt = 500
    """Number of annotated proteins to align to each query: those that share the most 4-mers, as in align's prefilter
    kmer."""
    max_evalue: PositiveFloat = 1e-3
    """Maximum E-value of a hit."""


class NeighboursSection(Section):
    """Predict terms from the nearest proteins in embedding space."""

    number: PositiveInt = 10
    """Number of nearest proteins to take terms from."""
    temperature: PositiveFloat = 0.05
    """Temperature of the weights: a neighbour has weight exp(cosine / temperature)."""


class TermsSection(Section):
    """Function prediction: a network that learns terms, with the head, loss and patience of model.classifier, blended
    with other predictors."""

    network: Literal["vectors", "backbone"] = "vectors"
    """vectors: train only the head, on embeddings; backbone: train model.backbone as well, end to end or with LoRA."""
    parts: list[Part] = Field(default=_PARTS, min_length=1)
    """Predictors to blend. naive: frequency of terms; homology and neighbours: see below; network: this network."""
    embeddings: EmbeddingsSection = EmbeddingsSection()
    homology: HomologySection = HomologySection()
    neighbours: NeighboursSection = NeighboursSection()
