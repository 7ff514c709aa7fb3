"""Settings of the scores of a protein's mutants, and of models that are fitted to measured ones."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from esmeray.train_config.section import NonNegativeInt, PositiveInt, Precision, Section, Tokens

Folds = Literal["random", "modulo", "contiguous"]


class MutationsSection(Section):
    """Wild type and method, and how the models run."""

    sequence: Path
    """FASTA file of the wild type alone."""
    first_position: PositiveInt = 1
    """Number of the first residue."""
    method: Literal["wild_type", "masked", "pseudo"] = "masked"
    """wild_type: one pass; masked: one for each mutated position; pseudo: one for each position of each mutant, which
    scores insertions and deletions too."""
    max_length: PositiveInt = 1022
    """Residues of a window around each position, where the sequence has more."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    precision: Precision = "fp32"
    """Precision of the computation; bf16 rounds log-probabilities."""
    device: str | None = None
    """cpu, cuda, cuda:1 ... Default: CUDA where there is one."""
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
    """Beside the zero-shot score: means over the residues; or the residues and amino acids that are won and lost."""
    zero_shot_column: str | None = None
    """Column of zero-shot scores, in place of the model's."""
    folds: list[Folds] = Field(["random", "modulo", "contiguous"])
    """Folds of five: mutants at random, mutated positions in turn, or segments of them."""
    sizes: list[PositiveInt] = Field([])
    """Also cross-validate with so many mutants of each training part."""
    seed: NonNegativeInt = 0
    """Seed of folds and resamplings."""
