"""Settings of protein vectors, and of the prediction and evaluation of terms."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.dataset.section import GafDate
from esmeray.train_config.section import PATH, PATH_OR_NAME, Coverage, PositiveInt, Section

COMPOSITION = "composition"
MAX_TERMS = 1500
"""Maximum number of terms of a protein, over all aspects, in CAFA 6."""

Normalisation = Literal["cafa", "pred", "gt"]


class EmbeddingsSection(Section):
    """Vectors of proteins, for the neighbours and for the network on vectors."""

    model: Annotated[str, PATH_OR_NAME] = COMPOSITION
    """Model whose mean over residues is used: a transformers folder or hub name, an Esmeray run, or its export; or
    'composition': frequencies of amino acids, of pairs, and of triples of similar amino acids, which need no model."""
    store: Annotated[str | None, PATH] = None
    """Folder of embeddings of the sequences by this model, written by `esmeray embed run`. Default: computed before
    training."""
    max_length: PositiveInt | None = None
    """Maximum sequence length in residues; longer sequences are cropped to their start. Default: what the positions of
    the model reach."""

    @model_validator(mode="after")
    def _names_the_model(self) -> "EmbeddingsSection":
        if self.store is not None and self.model == COMPOSITION:
            raise ValueError("store contains vectors of a model: set model to the model that computed them")
        return self


class PredictTermsSection(Section):
    """Sequences, and the file of predictions."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders, quoted globs, or one store."""
    output: Path
    """TSV file to write."""
    format: Literal["cafa", "cafa6"] = "cafa"
    """Format of the file: cafa6 leaves roots out, allows 1,500 terms per protein, and checks the written file by its
    rules."""
    terms: PositiveInt | None = None
    """Maximum number of terms per protein, over all aspects. Default: 500; with cafa6, 1,500."""
    part: Literal["ranker", "blend", "naive", "homology", "neighbours", "network"] = "ranker"
    """Scores to write: of the ranker, of the blend, or of a single part."""
    coverage: Coverage | None = None
    """Write conformal sets in place of the highest scores. A set contains on average this share of the terms of a
    protein in each aspect."""

    @model_validator(mode="after")
    def _takes_the_terms(self) -> "PredictTermsSection":
        if self.coverage is not None and (self.format == "cafa6" or self.part != "ranker" or self.terms):
            raise ValueError("coverage: sets are of the ranker, whole, in the format cafa: remove part, format, terms")
        if self.format == "cafa6" and self.most_terms > MAX_TERMS:
            raise ValueError(f"terms: cafa6 allows at most {MAX_TERMS:,} per protein: lower it")
        return self

    @property
    def most_terms(self) -> int:
        return self.terms or (MAX_TERMS if self.format == "cafa6" else 500)


class EvaluationSection(Section):
    """Options of an evaluation."""

    norm: Normalisation = "cafa"
    """Proteins to average over: pred: predicted proteins, gt: annotated ones, cafa: predicted ones for precision,
    annotated ones for everything else."""
    propagation: Literal["max", "fill"] = "max"
    """Scores of ancestors: max: the largest score at or below them, fill: the same if they have no score of their
    own."""
    orphans: bool = True
    """Evaluate terms without parents; values weighted by information accretion always include them."""
    step: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """First threshold and step between thresholds, between 0 and 1."""


class EvaluateTermsSection(EvaluationSection):
    """Files and options of an evaluation."""

    truth: Path
    """Annotations to evaluate against: a table of proteins and terms, or GAF."""
    ontology: Path | None = None
    """OBO file of the ontology, e.g. go-basic.obo. A run has its own."""
    input: list[str] = Field(default=[])
    """Sequences of the truth's proteins, to evaluate a run: FASTA files, folders, quoted globs, or one
    store."""
    calibrate: bool = False
    """Calibrate the sets and scores of the run with these proteins. Never use test proteins."""
    ia: Path | None = None
    """TSV of term and information accretion."""
    ia_from: Path | None = None
    """Annotations to compute information accretion from, in place of ia."""
    known: Path | None = None
    """Annotations known before, which are not evaluated (partial knowledge)."""
    terms: Path | None = None
    """File of the terms to evaluate. Default: all."""
    aspect: str | None = None
    """The only aspect allowed in the files, e.g. molecular_function."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Handling of terms that are not in the ontology and proteins without annotation. refuse: name the line; ignore:
    leave them out and count them."""
    evidence: list[str] = Field(default=[])
    """Evidence codes to keep in GAF, and in a table that has codes. Default: experimental ones."""
    since: GafDate = ""
    """First date to keep in GAF, YYYYMMDD."""
    before: GafDate = ""
    """End of the dates to keep in GAF, YYYYMMDD, exclusive."""
    output: Path | None = None
    """Folder to create for the results."""

    @model_validator(mode="after")
    def _has_ontology_or_input(self) -> "EvaluateTermsSection":
        if not self.input and (self.calibrate or self.ontology is None):
            raise ValueError("give ontology for a file of predictions, or input for a run, also to calibrate it")
        files = [name for name in ("ontology", "ia", "ia_from", "known", "terms") if getattr(self, name)]
        if self.input and files:
            raise ValueError(f"{', '.join(files)}: not with input, which evaluates a run; remove it")
        return self
