"""Settings of function prediction: the network, and the predictors that it is blended with."""

from typing import Literal

from pydantic import Field

from esmeray.function.section import EmbeddingsSection
from esmeray.train_config.section import PositiveFloat, PositiveInt, Section

Part = Literal["naive", "homology", "neighbours", "network"]

_PARTS: list[Part] = ["naive", "homology", "neighbours", "network"]


class HomologySection(Section):
    """Terms of similar proteins, by the sum of their bit scores."""

    candidates: PositiveInt = 500
    """Annotated proteins that are aligned to each query: those that share the most 4-mers, as align's prefilter kmer
    has it."""
    max_evalue: PositiveFloat = 1e-3
    """Largest E-value of a hit."""


class NeighboursSection(Section):
    """Terms of the nearest proteins in the space of embeddings."""

    number: PositiveInt = 10
    """Nearest proteins that a protein's terms are taken from."""
    temperature: PositiveFloat = 0.05
    """A neighbour weighs exp(cosine / temperature)."""


class TermsSection(Section):
    """Function prediction: a network that learns terms, with the head, loss and patience of model.classifier, and the
    blend of its probabilities with other predictors."""

    network: Literal["vectors", "backbone"] = "vectors"
    """vectors: the head alone, on embeddings; backbone: model.backbone as well, end to end or by LoRA."""
    parts: list[Part] = Field(default=_PARTS, min_length=1)
    """Predictors that are blended. naive: frequency of terms; homology and neighbours as below; network."""
    embeddings: EmbeddingsSection = EmbeddingsSection()
    homology: HomologySection = HomologySection()
    neighbours: NeighboursSection = NeighboursSection()
