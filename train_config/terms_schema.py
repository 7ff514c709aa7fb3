"""Settings of function prediction: annotated proteins, and the predictors that are fitted to them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.natures import PATH, PATH_OR_NAME
from esmeray.train_config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

COMPOSITION = "composition"
Part = Literal["naive", "homology", "neighbours", "network"]
Normalisation = Literal["cafa", "pred", "gt"]
GafDate = Annotated[str, Field(pattern=r"^(\d{8})?$")]
"""YYYYMMDD, or empty."""
_PARTS: list[Part] = ["naive", "homology", "neighbours", "network"]


class TermsDataSection(Section):
    """Terms of the proteins of data.source, and which proteins are held out to stop the network and to weight the
    blend: a share of them by data.validation_share, or as said here."""

    annotations: str | None = None
    """TSV of protein and term, or GAF 2.2. Terms of proteins without sequence are left out and counted. None with
    data.source 'sample'."""
    ontology: str | None = None
    """OBO file of the ontology, as go-basic.obo."""
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
    since: GafDate = ""
    """Date, YYYYMMDD: hold out the proteins without an annotation before it. GAF alone has dates."""
    clusters: str | None = None
    """TSV of cluster and protein, as MMseqs2 writes it: hold out data.validation_share of whole clusters, by a hash of
    their names."""

    @model_validator(mode="after")
    def _fits_together(self) -> "TermsDataSection":
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
    """Residues of the longest sequence, of longer ones the start is taken. Default: what positions of the model
    reach."""

    @model_validator(mode="after")
    def _names_the_model(self) -> "EmbeddingsSection":
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
    """Nearest proteins that a protein's terms are taken from."""
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


class EvaluationSection(Section):
    """Choices of an evaluation."""

    norm: Normalisation = "cafa"
    """Proteins to average over: predicted, annotated, or as CAFA the first for precision alone."""
    propagation: Literal["max", "fill"] = "max"
    """Scores of ancestors: the largest below them, or that only where they have none."""
    orphans: bool = True
    """Evaluate terms without parents; values by weight always have them."""
    step: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """First threshold, and step between thresholds, below 1."""
    draws: NonNegativeInt = 1000
    """Draws of proteins for the intervals; 0 for none."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""


class EvaluateTermsSection(EvaluationSection):
    """Files and choices of an evaluation."""

    truth: Path
    """Annotations to evaluate by: TSV of protein and term, or GAF 2.2."""
    ontology: Path
    """OBO file of the ontology, as go-basic.obo."""
    ia: Path | None = None
    """TSV of term and information accretion."""
    ia_from: Path | None = None
    """Annotations to compute information accretion from instead."""
    known: Path | None = None
    """Annotations known before, which do not count (partial knowledge)."""
    terms: Path | None = None
    """File of the terms that count, one a line. Default: all."""
    aspect: str | None = None
    """The only aspect that the files may have, such as molecular_function."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Lines with terms that the ontology does not have, or proteins without annotation."""
    evidence: list[str] = Field([])
    """Evidence codes to take from GAF. Default: experimental ones."""
    since: GafDate = ""
    """First date to take from GAF, YYYYMMDD."""
    before: GafDate = ""
    """First date not to take from GAF, YYYYMMDD."""
    output: Path | None = None
    """Folder to make for the results."""


class PredictTermsSection(Section):
    """Sequences, and what is written."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders, quoted globs, or one store."""
    output: Path
    """TSV file to write."""
    terms: PositiveInt = 500
    """Most terms of a protein, over all aspects."""
    part: Literal["blend", "naive", "homology", "neighbours", "network"] = "blend"
    """Scores to write: the blend, or those of one of its parts alone."""
