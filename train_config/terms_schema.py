"""Settings of function prediction: annotated proteins, and the predictors that are fitted to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from train_config.natures import PATH, PATH_OR_NAME
from train_config.section import PositiveFloat, PositiveInt, Section

COMPOSITION = "composition"
Part = Literal["naive", "homology", "neighbours", "network"]
_PARTS: list[Part] = ["naive", "homology", "neighbours", "network"]


class TermsDataSection(Section):
    """Terms of the proteins of data.source, and which proteins are held out to stop the network and to weight the
    blend: a share of them by data.validation_share, or as said here."""

    annotations: str | None = None
    """TSV of protein and term, or GAF 2.2. Terms of proteins without sequence are left out and counted. None with
    data.source 'sample'."""
    ontology: str | None = None
    """Ontology, OBO."""
    ia: str | None = None
    """TSV of term and information accretion. Default: computed from the annotations."""
    evidence: list[str] = Field([])
    """Evidence codes to take from GAF. Default: experimental ones."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Annotations with terms that the ontology does not have."""
    min_count: PositiveInt = 10
    """Fewest training proteins of a term that the network learns."""
    validation: str | None = None
    """File of the ids to hold out, one a line."""
    since: Annotated[str, Field(pattern=r"^(\d{8})?$")] = ""
    """Date, YYYYMMDD: hold out the proteins without an annotation before it. GAF alone has dates."""
    clusters: str | None = None
    """TSV of cluster and protein, as MMseqs2 writes it: hold out data.validation_share of whole clusters, by a hash of
    their names."""

    @model_validator(mode="after")
    def _fits_together(self) -> TermsDataSection:
        if bool(self.annotations) != bool(self.ontology):
            raise ValueError("annotations and ontology go together: set both, or none for the sample")
        if sum(map(bool, (self.validation, self.since, self.clusters))) > 1:
            raise ValueError("validation, since and clusters exclude each other: set one of them")
        return self


class EmbeddingsSection(Section):
    """Vectors of proteins, for the neighbours and for the network on vectors."""

    model: Annotated[str, PATH_OR_NAME] = COMPOSITION
    """Folder or hub name of transformers, an Esmeray run, or its export, whose mean over residues is taken; or
    'composition': frequencies of amino acids, of pairs and of triples of like ones, which need no model."""
    store: Annotated[str | None, PATH] = None
    """Folder of embeddings of the sequences by this model, as embed made it. Default: computed before training."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M) with random weights, to try things out."""
    max_length: PositiveInt | None = None
    """Residues; of longer sequences the start is taken. Default: what positions of the model reach."""

    @model_validator(mode="after")
    def _names_the_model(self) -> EmbeddingsSection:
        if self.store is not None and self.model == COMPOSITION:
            raise ValueError("store has vectors of a model: set model to the one that computed them")
        return self


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
    """Neighbours."""
    temperature: PositiveFloat = 0.05
    """A neighbour weighs exp(cosine / temperature)."""


class TermsSection(Section):
    """Function prediction: a network that learns terms, with the head, loss and patience of model.classifier, and the
    blend of its probabilities with other predictors."""

    network: Literal["vectors", "backbone"] = "vectors"
    """vectors: the head alone, on embeddings; backbone: model.backbone as well, end to end or by LoRA."""
    parts: list[Part] = Field(_PARTS, min_length=1)
    """Predictors that are blended. naive: frequency of terms; homology and neighbours as below; network."""
    embeddings: EmbeddingsSection = EmbeddingsSection()
    homology: HomologySection = HomologySection()
    neighbours: NeighboursSection = NeighboursSection()
