"""Settings to score a protein's mutants, and to fit models to measured mutants."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.train_config.section import ComputeSection, NonNegativeInt, PositiveInt, Precision, Section

Folds = Literal["random", "modulo", "contiguous", "rest"]


class MutationsSection(ComputeSection):
    """Wild type, method, and how the models run."""

    sequence: Path | None = None
    """FASTA file of the wild type, or of several. With several, names are in the column protein, or are the names of a
    folder's tables.
    """
    first_position: PositiveInt = 1
    """Number of the first residue in the table's numbering."""
    method: Literal["wild_type", "masked", "pseudo"] = "masked"
    """Scoring method. wild_type: one pass; masked: one pass per mutated position; pseudo: one pass per position of each
    mutant, which also scores insertions and deletions.
    """
    max_length: PositiveInt | None = None
    """Residues of the window around each position in longer sequences. Default: 1022, or the model's limit if that is
    lower.
    """
    precision: Precision = "fp32"
    """Precision of the computation; bf16 rounds log-probabilities."""


class MutantTableSection(MutationsSection):
    """Tables of mutants, and their wild type."""

    table: list[Path] = Field(min_length=1)
    """CSV, TSV or Parquet files of mutants with the same columns, e.g. of several plates; or a folder with one such
    file per protein, e.g. ProteinGym's. Tables in a folder that have a column mutated_sequence need no FASTA file.
    """
    mutant_column: str | None = None
    """Column of mutants in the table, e.g. A24G, A24G:C25D or p.Ala24Gly. Default: the first that the table has of
    mutant, hgvs_pro, variant, mutation, mutations, mutants, variants and aa_substitutions.
    """
    sequence_column: str | None = None
    """Column of whole sequences in the table, instead of mutants."""
    bad_mutants: Literal["error", "empty"] = "error"
    """Handling of mutants that are missing or don't match the wild type. error: reject the table; empty: leave the
    score empty and count them. Stops, deletions and other mutants without a score are always left empty and counted.
    """
    not_missing: list[str] = Field(default=[])
    """Texts that are values, although tables use them for missing values, e.g. NA (neuraminidase)."""

    @property
    def source(self) -> str:
        """Paths of the tables, for messages."""
        return " and ".join(map(str, self.table))


class MutationScoreSection(MutantTableSection):
    """Mutants, scores, and how the models run."""

    output: Path
    """File to write: .csv, .tsv or .parquet."""
    more_models: list[str] = Field(default=[])
    """Additional models; the score is the mean over all models."""
    measured_column: str | None = None
    """Column of measured values to evaluate the scores against."""
    compare: list[str] = Field(default=[])
    """Columns of other scores to evaluate as well."""


class MutationScanSection(MutationsSection):
    """Wild type, scores of all its single mutants, and how the model runs."""

    output: Path
    """Folder to create for the results."""


class MutationFitSection(MutantTableSection):
    """Measured mutants, features, evaluation, and how the model runs."""

    output: Path
    """Folder to create for the results."""
    measured_column: str = "score"
    """Column of measured values in the table; higher is better."""
    features: Literal["embeddings", "one_hot"] = "embeddings"
    """Features in addition to the zero-shot score and, for substitutions, the residue at each position. embeddings:
    mean embeddings over the residues; one_hot: none.
    """
    zero_shot_column: str | None = None
    """Column of zero-shot scores, which replace the model's. With features one_hot no model is needed."""
    seed: NonNegativeInt = 0
    """Random seed of folds, draws and resamplings."""
    folds: list[Folds] = Field(default=[])
    """Kinds of five-fold cross-validation: random mutants, mutated positions in turn (modulo), or segments of positions
    (contiguous). rest: no folds; each size is drawn once and predicts the other mutants. Default: the first three, or
    random if mutants have several mutations.
    """
    sizes: list[PositiveInt] = Field(default=[])
    """Additional training set sizes to cross-validate with, for the learning curve."""
    groups: str | None = None
    """Column with a group per mutant, e.g. a sequence cluster. A group is never split between training and test
    mutants. For folds random and rest.
    """

    @property
    def needs_model(self) -> bool:
        """Return whether a model computes the features or the zero-shot scores."""
        return self.features == "embeddings" or self.zero_shot_column is None


Strategy = Literal["ei", "ucb", "thompson"]


class MutationProposeSection(Section):
    """Mutants to measure next."""

    output: Path
    """CSV file to write."""
    device: str | None = None
    """Device of the model's computation: cpu, cuda, cuda:1 ... Default: CUDA if available."""
    number: PositiveInt = 96
    """Number of mutants to propose. Default: 96, one plate."""
    strategy: Strategy = "ucb"
    """Selection strategy. ei: expected improvement over the best so far; ucb: mean plus two standard deviations;
    thompson: the best mutant of each posterior sample.
    """
    candidates: list[Literal["singles", "combinations", "listed"]] = Field(default=["singles", "combinations"])
    """Candidates. singles: all single mutants; combinations: combinations of measured mutations; listed: rows of the
    fit's tables without a measured value.
    """
    mutations: PositiveInt = 2
    """Maximum number of mutations in a combination."""
    exclude_positions: list[Annotated[str, Field(pattern="^[0-9]+(-[0-9]+)?$")]] = Field(default=[])
    """Positions to leave unchanged, e.g. 24 or 30-41."""
    exclude_residues: str = Field(default="", pattern=f"(?i)^[{AMINO_ACIDS}]*$")
    """Amino acids that are not introduced, e.g. CPM."""
    protein: str | None = None
    """Name of the protein, if the model is fitted to several."""
    seed: NonNegativeInt = 0
    """Random seed of the draws."""


class MutationCampaignSection(Section):
    """Rounds of proposals to simulate."""

    output: Path
    """Folder to create for the results."""
    rounds: PositiveInt = 5
    """Number of plates to measure, one after the other."""
    number: PositiveInt = 96
    """Number of mutants per plate."""
    strategy: Strategy = "ucb"
    """Selection strategy: expected improvement (ei), upper confidence bound (ucb), or posterior samples (thompson)."""
    seed: NonNegativeInt = 0
    """Random seed of posterior samples."""
