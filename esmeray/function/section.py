"""Settings of vectors of proteins, and of the prediction and evaluation of their terms."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.dataset.section import GafDate
from esmeray.train_config.natures import PATH, PATH_OR_NAME
from esmeray.train_config.section import NonNegativeInt, PositiveInt, Section

COMPOSITION = "composition"
MOST_TERMS = 1500
"""Terms of a protein, over all aspects, that CAFA 6 takes."""

Normalisation = Literal["cafa", "pred", "gt"]


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


class PredictTermsSection(Section):
    """Sequences, and what is written."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders, quoted globs, or one store."""
    output: Path
    """TSV file to write."""
    format: Literal["cafa", "cafa6"] = "cafa"
    """Rules of the file: cafa6 leaves roots out, takes 1,500 terms of a protein, and is read again by its rules."""
    terms: PositiveInt | None = None
    """Most terms of a protein, over all aspects. Default: 500, and with cafa6 as many as it takes."""
    part: Literal["ranker", "blend", "naive", "homology", "neighbours", "network"] = "ranker"
    """Scores to write: the ranker's, the blend's, or those of one of its parts alone."""

    @model_validator(mode="after")
    def _takes_the_terms(self) -> "PredictTermsSection":
        if self.format == "cafa6" and self.most_terms > MOST_TERMS:
            raise ValueError(f"terms: cafa6 takes {MOST_TERMS:,} of a protein: lower it")
        return self

    @property
    def most_terms(self) -> int:
        return self.terms or (MOST_TERMS if self.format == "cafa6" else 500)


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
    """Annotations to evaluate by: a table of proteins and terms, or GAF."""
    ontology: Path
    """OBO file of the ontology, as go-basic.obo."""
    ia: Path | None = None
    """TSV of term and information accretion."""
    ia_from: Path | None = None
    """Annotations to compute information accretion from instead."""
    known: Path | None = None
    """Annotations known before, which do not count (partial knowledge)."""
    terms: Path | None = None
    """File of the terms that count. Default: all."""
    aspect: str | None = None
    """The only aspect that the files may have, such as molecular_function."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Terms that the ontology does not have, and proteins without annotation. refuse: name the line; ignore: leave out,
    counted."""
    evidence: list[str] = Field(default=[])
    """Evidence codes to take from GAF, and from a table that has some. Default: experimental ones."""
    since: GafDate = ""
    """First date to take from GAF, YYYYMMDD."""
    before: GafDate = ""
    """First date not to take from GAF, YYYYMMDD."""
    output: Path | None = None
    """Folder to make for the results."""
