"""Settings of the scores of a protein's mutants, and of models that are fitted to measured ones."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from esmeray.train_config.section import ComputeSection, NonNegativeInt, PositiveInt, Precision

Folds = Literal["random", "modulo", "contiguous"]


class MutationsSection(ComputeSection):
    """Wild type and method, and how the models run."""

    sequence: Path
    """FASTA file of the wild type alone."""
    first_position: PositiveInt = 1
    """Number of the first residue, from which the table counts positions."""
    method: Literal["wild_type", "masked", "pseudo"] = "masked"
    """Passes of the model. wild_type: one; masked: one for each mutated position; pseudo: one for each position of each
    mutant, which scores insertions and deletions too."""
    max_length: PositiveInt = 1022
    """Residues of a window around each position, where the sequence has more."""
    precision: Precision = "fp32"
    """Precision of the computation; bf16 rounds log-probabilities."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M), whose weights are random, to try things out."""


class MutantTableSection(MutationsSection):
    """Mutants of a table beside that."""

    table: Path
    """CSV, TSV or Parquet file of mutants."""
    mutant_column: str = "mutant"
    """Column of the mutants in the table, as A24G or A24G:C25D."""
    sequence_column: str | None = None
    """Column of whole sequences in the table, in place of mutants."""
    bad_mutants: Literal["error", "empty"] = "error"
    """Mutants that the wild type can't have. error: refuse; empty: leave the score empty, counted."""
    bootstrap: PositiveInt = 1000
    """Resamplings for the confidence intervals of metrics."""


class MutationScoreSection(MutantTableSection):
    """Mutants, scores, and how the models run."""

    output: Path
    """File to write: .csv, .tsv or .parquet."""
    more_models: list[str] = Field([])
    """Further models; the score is the mean of all."""
    measured_column: str | None = None
    """Column of measured values, by which the scores are evaluated."""
    compare: list[str] = Field([])
    """Columns of other scores, to evaluate beside."""


class MutationScanSection(MutationsSection):
    """Wild type, scores of all its single mutants, and how the models run."""

    output: Path
    """Folder to make for the results."""
    more_models: list[str] = Field([])
    """Further models; the score is the mean of all."""


class MutationFitSection(MutantTableSection):
    """Measured mutants, features, and how the model runs."""

    output: Path
    """Folder to make for the results."""
    measured_column: str = "score"
    """Column of the measured values in the table."""
    features: Literal["embeddings", "one_hot"] = "embeddings"
    """Features beside the zero-shot score. embeddings: means over the residues; one_hot: residues and amino acids that
    are won and lost."""
    zero_shot_column: str | None = None
    """Column of zero-shot scores, in place of the model's."""
    folds: list[Folds] = Field(["random", "modulo", "contiguous"])
    """Folds of five: mutants at random, mutated positions in turn, or segments of them."""
    sizes: list[PositiveInt] = Field([])
    """Also cross-validate with so many mutants of each training part."""
    seed: NonNegativeInt = 0
    """Seed of folds and resamplings."""
