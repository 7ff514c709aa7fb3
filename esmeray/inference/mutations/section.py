"""Settings of the scores of a protein's mutants, and of models that are fitted to measured ones."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.train_config.section import ComputeSection, NonNegativeInt, PositiveInt, Precision, Share

Folds = Literal["random", "modulo", "contiguous", "rest"]


class MutationsSection(ComputeSection):
    """Wild type and method, and how the models run."""

    sequence: Path | None = None
    """FASTA file of the wild type, or of several by the names of the column protein or of a folder's tables."""
    first_position: PositiveInt = 1
    """Number of the first residue, from which the table counts positions."""
    method: Literal["wild_type", "masked", "pseudo"] = "masked"
    """Passes of the model. wild_type: one; masked: one for each mutated position; pseudo: one for each position of each
    mutant, which scores insertions and deletions too."""
    max_length: PositiveInt | None = None
    """Residues of a window around each position, if the sequence has more. Default: 1022, or the model's limit if that
    is lower."""
    precision: Precision = "fp32"
    """Precision of the computation; bf16 rounds log-probabilities."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M), whose weights are random, to try things out."""


class MutantTableSection(MutationsSection):
    """Mutants of a table, and their wild type."""

    table: Path
    """CSV, TSV or Parquet file of mutants; or a folder of one for each protein, such as ProteinGym's, whose tables need
    no FASTA file where they have a column mutated_sequence."""
    more_tables: list[Path] = Field(default=[])
    """Further ones with the same columns, such as the plates measured since."""
    mutant_column: str | None = None
    """Column of the mutants in the table, as A24G, A24G:C25D or p.Ala24Gly. Default: mutant, hgvs_pro, variant or
    mutation, the first that the table has."""
    sequence_column: str | None = None
    """Column of whole sequences in the table, in place of mutants."""
    bad_mutants: Literal["error", "empty"] = "error"
    """Mutants that are missing, or that the wild type can't have. error: refuse; empty: leave the score empty, counted.
    Stops, deletions and other mutants without a score are always left empty and counted."""
    not_missing: list[str] = Field(default=[])
    """Texts that are values, although tables mean a missing value by them, e.g. NA (neuraminidase)."""
    bootstrap: PositiveInt = 1000
    """Resamplings for the confidence intervals of metrics."""


class MutationScoreSection(MutantTableSection):
    """Mutants, scores, and how the models run."""

    output: Path
    """File to write: .csv, .tsv or .parquet."""
    more_models: list[str] = Field(default=[])
    """Further models; the score is the mean of all."""
    measured_column: str | None = None
    """Column of measured values, by which the scores are evaluated."""
    compare: list[str] = Field(default=[])
    """Columns of other scores, which are evaluated as well."""


class MutationScanSection(MutationsSection):
    """Wild type, scores of all its single mutants, and how the models run."""

    output: Path
    """Folder to make for the results."""
    more_models: list[str] = Field(default=[])
    """Further models; the score is the mean of all."""


class MutationLearningSection(MutantTableSection):
    """Measured mutants, features, and how the model runs."""

    output: Path
    """Folder to make for the results."""
    measured_column: str = "score"
    """Column of the measured values in the table; higher is better."""
    features: Literal["embeddings", "one_hot"] = "embeddings"
    """Features in addition to the zero-shot score and, of substitutions, the residues of each position. embeddings:
    means over the residues; one_hot: no others."""
    zero_shot_column: str | None = None
    """Column of zero-shot scores, in place of the model's. With features one_hot no model is needed."""
    seed: NonNegativeInt = 0
    """Seed of folds, draws and resamplings."""

    def numbers(self, command: str) -> dict[str | None, str]:
        """Columns with numbers, and the option that a message names where one is missing."""
        return {
            self.measured_column: f"{command}.measured_column",
            self.zero_shot_column: f"{command}.zero_shot_column",
        }


class MutationFitSection(MutationLearningSection):
    """Measured mutants, features, evaluation, and how the model runs."""

    bootstrap: PositiveInt = 100
    """Resamplings for the confidence intervals of metrics."""
    folds: list[Folds] = Field(default=[])
    """Folds of five: mutants at random, mutated positions in turn (modulo), or segments of them (contiguous); rest: no
    folds, each size is drawn once and predicts the rest. Default: the first three; of several mutations random."""
    sizes: list[PositiveInt] = Field(default=[])
    """Also cross-validate with so many mutants of each training part, for the learning curve."""
    groups: str | None = None
    """Column of a group of each mutant, e.g. a cluster of sequences: a group is never divided between training and test
    mutants. For folds random and rest."""


Strategy = Literal["ei", "ucb", "thompson"]


class MutationProposeSection(ComputeSection):
    """Mutants to measure next, and how the model runs."""

    output: Path
    """CSV file to write."""
    number: PositiveInt = 96
    """Mutants to propose: a plate has 96."""
    strategy: Strategy = "ucb"
    """ei: expected improvement over the best so far; ucb: mean and two standard deviations; thompson: the best of
    draws."""
    candidates: list[Literal["singles", "combinations", "listed"]] = Field(default=["singles", "combinations"])
    """singles: all single mutants; combinations: of mutations that were measured; listed: the rows of the fit's tables
    without a measured value."""
    mutations: PositiveInt = 2
    """Most mutations of a combination."""
    exclude_positions: list[Annotated[str, Field(pattern="^[0-9]+(-[0-9]+)?$")]] = Field(default=[])
    """Positions to leave as they are, as 24 or 30-41."""
    exclude_residues: str = Field(default="", pattern=f"(?i)^[{AMINO_ACIDS}]*$")
    """Amino acids not to introduce, as CPM."""
    protein: str | None = None
    """Name of the protein, where the model is fitted to several."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""


class MutationCampaignSection(MutationLearningSection):
    """A measured assay, rounds to simulate, and how the model runs."""

    rounds: PositiveInt = 5
    """Plates to measure, one after the other."""
    number: PositiveInt = 96
    """Mutants of a plate."""
    strategy: Strategy = "ucb"
    """Choice of mutants: expected improvement, upper bound, or draws."""
    repeats: PositiveInt = 3
    """Campaigns with seeds of their own."""
    top_share: Share = 0.01
    """The mutants to find: this share of all, the best."""
