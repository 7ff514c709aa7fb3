"""Settings of the commands that are no experiment's: each has a tree of sections, named after it in :data:`COMMANDS`.

An experiment's sections keep their names and meaning here.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from esmeray.service.section import KeySection, QuerySection, ServiceSettings
from esmeray.train_config.classifier_schema import Part
from esmeray.train_config.diffusion_schema import CaOnly, PredictionsSection, StructuresSection
from esmeray.train_config.embed_schema import EmbedJobSection
from esmeray.train_config.mutation_schema import MutationFitSection, MutationScanSection, MutationScoreSection
from esmeray.train_config.plan_schema import PlanSection
from esmeray.train_config.schema import IngestSection, StorageSection
from esmeray.train_config.section import (
    DEFAULT_TOKENS,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
    Section,
    Share,
    Tokens,
)
from esmeray.train_config.terms_schema import EvaluateTermsSection, PredictTermsSection


class IngestedSection(Section):
    """Policies for files."""

    ingest: IngestSection = IngestSection()


class FastaSection(IngestedSection):
    """FASTA files, and what is done with unusual records."""

    source: list[str] = Field(min_length=1)
    """FASTA files (plain, .gz, .bz2, .xz, .zst), folders or quoted globs."""


class ConvertSection(Section):
    """The store."""

    store: str | None = None
    """Folder of the store to make."""


class ConvertSettings(Section):
    """From FASTA to a store."""

    convert: ConvertSection = ConvertSection()
    data: FastaSection


class StructureFilesSection(Section):
    """Structure files."""

    source: list[str] = Field(min_length=1)
    """PDB, mmCIF or BinaryCIF files, folders or quoted globs; FASTA files or a store with data.predictions."""
    validation_share: Share = 0.05
    """Share held out, without data.structures.validation_source."""
    structures: StructuresSection = StructuresSection()
    predictions: PredictionsSection = PredictionsSection()


class StructureStoreSection(Section):
    """The store."""

    store: str
    """Folder of the store to make."""


class StructuresSettings(Section):
    """From structure files to a store."""

    structures: StructureStoreSection
    data: StructureFilesSection


class ExportSection(Section):
    """An export."""

    checkpoint: str = "latest"
    """Checkpoint to export: latest; best, of the lowest validation loss; or a name such as step-00000100."""
    weights: Literal["last", "mean"] = "last"
    """last: those of the checkpoint's step; mean: their exponential mean, of a run with training.weight_mean."""
    output: str | None = None
    """Folder to write. Default: export-CHECKPOINT in the run's folder."""


class AlignSection(Section):
    """Queries, store, scoring and what to keep."""

    queries: str
    """FASTA file, folder or quoted glob, or a store."""
    store: Path
    """Store of proteins to search in."""
    output: Path
    """TSV file of the results to write."""
    hits: PositiveInt = 10
    """Hits of each query, at most."""
    evalue: PositiveFloat = 10.0
    """Largest E-value of a hit; inf keeps all."""
    matrix: str = "BLOSUM62"
    """BLOSUM45, 50, 62 or 80, PAM250, or a file in NCBI's format."""
    gap_open: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Penalty of a gap. Default: BLAST's for the matrix."""
    gap_extend: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Penalty of each residue of a gap. Default: BLAST's."""
    prefilter: Literal["none", "kmer", "embedding"] = "none"
    """Align all records, those that share words of four residues, or those of near embeddings."""
    candidates: PositiveInt = 1000
    """Records that a prefilter leaves to each query."""
    query_embeddings: Path | None = None
    """Folder of embeddings of the queries, one vector a protein."""
    store_embeddings: Path | None = None
    """Folder of embeddings of the store, one vector a protein."""
    header: bool = False
    """Name the columns in a first line."""
    threads: PositiveInt | None = None
    """Threads that compute. Default: the cores that this process may use."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that computes scores of all records."""


class ClusterSection(Section):
    """The cluster."""

    address: str | None = None
    """Ray cluster, HOST:PORT; local starts one. Default: RAY_ADDRESS, or one that runs here."""


class AlignSettings(Section):
    """An alignment."""

    align: AlignSection
    data: IngestedSection = IngestedSection()


class EmbedSettings(Section):
    """A job and its cluster."""

    embed: EmbedJobSection
    data: IngestedSection = IngestedSection()
    storage: StorageSection = StorageSection()
    ray: ClusterSection = ClusterSection()


class JoinSection(Section):
    """Folders to join, and the folder to make."""

    folders: list[Path] = Field(min_length=2)
    """Folders of embeddings, at least two."""
    output: Path
    """Folder to make for the results."""
    names: list[str] = Field([])
    """Output to take of each folder. Default: its first."""
    format: str | None = None
    """Format of the files, parquet or npy. Default: npy where the first folder has it."""


class SearchSection(Section):
    """Queries, and the kind of search."""

    queries: Path | None = None
    """Folder of embeddings to search with. Default: the database, without hits of itself."""
    output: Path
    """TSV file of the results to write."""
    top_k: PositiveInt = 10
    """Hits of each query, at most."""
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    """Measure by which proteins are near."""
    index: Literal["exact", "ivf"] = "exact"
    """All pairs, or the nearest clusters."""
    ivf_lists: PositiveInt | None = None
    """Clusters of the index. Default: 4 times the square root of the proteins, at most one for 39."""
    ivf_probes: PositiveInt = 16
    """Clusters that are searched for a query."""
    name: str | None = None
    """Output of the folders. Default: their first."""


class PlotSection(Section):
    """Labels, and the projection."""

    output: Path
    """Folder to make for the results."""
    labels: Path | None = None
    """CSV, TSV or Parquet file of labels. Default: lengths."""
    label_column: str = "label"
    """Column of the labels in the file of labels."""
    id_column: str = "id"
    """Column of the ids in the file of labels."""
    method: Literal["pca", "umap"] = "pca"
    """Projection to the plane; umap needs umap-learn."""
    name: str | None = None
    """Output to draw. Default: the folder's first."""
    max_points: Annotated[int, Field(gt=1)] = 20_000
    """Proteins to draw, at most; of more, a random sample."""


class ModelProfileSection(Section):
    """Texts, batches and precision of a profile of a model. An experiment has its own."""

    output: str | None = None
    """Folder to make. Default: profile-MODEL, here."""
    batches: PositiveInt = 10
    """Batches to trace, about; fewer where the input has no more."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    steps: list[Literal["stages", "batch_sizes", "accuracy"]] = Field(
        ["stages", "batch_sizes", "accuracy"], min_length=1
    )
    """What to measure. accuracy: of a classifier, whose input then needs labels."""
    outputs: list[str] = Field([])
    """Outputs to compute. Default: mean; classes of a classifier."""
    layers: list[int] = Field([-1], min_length=1)
    """Layers that outputs are taken from, as embed.layers."""
    long: Literal["error", "crop", "window"] = "crop"
    """Sequences of more than max_length residues, as embed.long; of stages alone, batch sizes are of cropped ones."""
    max_length: PositiveInt | None = None
    """Residues of the longest sequence, as embed.max_length. A classifier has its own limit."""
    precision: Precision | None = None
    """Precision of the computation. Default: bf16; fp32 on a processor without instructions for bf16."""
    device: Literal["cpu", "cuda"] | None = None
    """cpu or cuda. Default: CUDA where there is one."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M), whose weights are random, to try things out."""
    batch_sizes: list[PositiveInt] = Field([1, 4, 8, 16, 32, 64])
    """Texts of a batch whose latency and memory are measured; none to leave this out."""
    token_budgets: list[PositiveInt] = Field([])
    """Tokens of a batch, in place of batch_sizes."""
    warmup_runs: NonNegativeInt = 3
    """Batches of each size that don't count."""
    runs: PositiveInt = 20
    """Batches of each size that are measured."""


class DeviceProfileSection(Section):
    """Models and length of a comparison of devices."""

    models: list[str] = Field([])
    """Folders, hub names, sizes or runs."""
    output: str = "profile-devices"
    """Folder to make for the results."""
    proteins: PositiveInt = 200
    """Distinct sequences to embed."""
    rounds: PositiveInt = 3
    """Measurements of each device."""
    precision: Precision | None = None
    """Precision on both devices, where there is a GPU. Default: as embed."""
    random_weights: bool = False
    """Take sizes (esm2_t6_8M), whose weights are random, to try things out."""


class LogProfileSection(Section):
    """Files made of a GPU log."""

    output: str | None = None
    """The picture, a PNG. Default: beside the log, with its name."""
    json_output: str | None = None
    """Also write the summaries to this file, as JSON."""


class PredictTermsSettings(Section):
    """A prediction of terms."""

    predict: PredictTermsSection
    data: IngestedSection = IngestedSection()


class ClassifierRunSection(Section):
    """How a classifier runs."""

    device: str | None = None
    """cpu, cuda, cuda:1 ... Default: CUDA where there is one."""
    precision: Precision = "fp32"
    """Precision of the computation."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch; a longer text goes alone."""


class ClassifyPredictSection(ClassifierRunSection):
    """Texts, predictions, and how the classifier runs."""

    input: str
    """File, folder or quoted glob, or a URI."""
    output: Path
    """File to write: .csv, .tsv or .parquet, or its URI."""


class ClassifyEvaluateSection(ClassifierRunSection):
    """Records, report, and how the classifier runs."""

    input: str | None = None
    """Labelled file, folder or quoted glob, or a URI. Default: the run's own records."""
    output: Path | None = None
    """Folder of the report. Default: RUN/evaluations/INPUT-PART, or evaluation-INPUT-PART."""
    part: Part | None = None
    """Records of the input by the split column of the run's settings, all by default; or of the run's own by its split,
    those held out for validation by default."""
    baselines: bool = False
    """Fit simple baselines on what the run was trained on and show their metrics beside."""


class DesignModelSection(Section):
    """How a model of sequence diffusion runs."""

    label: str | None = None
    """Class that designs are conditioned on."""
    device: str | None = None
    """cpu or cuda. Default: CUDA where there is one."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch."""


class DesignStructuresSection(DesignModelSection):
    """Structures, and how the model runs."""

    structures: list[str] = Field([])
    """Structure files, folders or globs."""
    chains: str = "each"
    """each, first, complex, or names of chains, as A,B."""
    ca_only: CaOnly = "error"
    """Chains of CA atoms alone: refuse, leave out or complete them."""


class GenerateSection(DesignStructuresSection):
    """Structures, what to generate for them, and how the model runs."""

    output: Path
    """Folder to make for the results."""
    length: Annotated[int, Field(gt=0, le=5000)] | None = None
    """Residues of a design without a structure."""
    number: PositiveInt = 1
    """Sequences for each structure."""
    fix: str = ""
    """Positions that keep the structure's residue, as 1-10,57."""
    omit: str = ""
    """Amino acids that are not used, as CM."""
    tie: str = ""
    """Chains of a complex that get the same residues, as A,B."""
    temperature: NonNegativeFloat = 0.1
    """0: the likeliest residue; 1: as the model's probabilities say."""
    steps: Annotated[int, Field(gt=0, le=1000)] = 20
    """Steps of denoising for each sequence."""
    guidance: NonNegativeFloat = 1.0
    """Weight of the structure; above 1 it counts for more."""
    order: Literal["confidence", "random"] = "confidence"
    """Positions that are decided first."""
    seed: NonNegativeInt = 0
    """Seed of the random draws."""
    known: Path | None = None
    """Store of sequences to compare with: adds novelty to each."""


class ScoreSection(DesignStructuresSection):
    """Structures, sequences to score on them, and how the model runs."""

    sequences: list[str] = Field(min_length=1)
    """FASTA files, folders or globs."""
    output: Path
    """TSV file of the results to write."""


class DesignEvaluateSection(DesignModelSection):
    """Structures to evaluate on, and how the model runs."""

    store: Path
    """Structure store of the native structures."""
    part: Literal["all", "training", "validation"] = "all"
    """Part of the store: validation, where the model was trained on the rest."""
    predictions: Path | None = None
    """Folder of predicted structures, of a store that has none of its own."""
    steps: PositiveInt = 20
    """Steps of denoising for each sequence."""
    output: Path | None = None
    """JSON file to write."""


class FoldSection(Section):
    """Sequences, predictor, devices."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders or globs, or a store."""
    model: str
    """Folder or hub name of the predictor's weights."""
    predictor: str = "esmfold"
    """Kind of predictor: esmfold, esmfold2, or one of predictor_module."""
    predictor_module: list[str] = Field([])
    """Modules to import, which register further kinds."""
    cache: Path
    """Folder to keep predictions in."""
    cache_gb: PositiveFloat = 50.0
    """Size of the cache, GB, at most."""
    max_length: PositiveInt = 1024
    """Residues of the longest sequence; longer ones are left out."""
    tokens: PositiveInt = 1024
    """Residues of a batch, at most."""
    device: Literal["cpu", "cuda"] | None = None
    """cpu or cuda. Default: CUDA where there is one."""
    workers: PositiveInt | None = None
    """Actors on Ray that predict. Default: this process alone."""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that each actor gets."""
    gpus_per_worker: PositiveFloat = 1.0
    """GPUs of an actor; 0.5 puts two on each."""
    max_failures: NonNegativeInt = 3
    """Times that a batch may lose its actor."""


class FoldSettings(Section):
    """Predictions of structures, and their cluster."""

    fold: FoldSection
    ray: ClusterSection = ClusterSection()


class _OneSection(Section):
    """Base of the schema of a command that has one section."""

    model_config = ConfigDict(use_attribute_docstrings=False)  # looked for in the source, of which there is none


def _alone(name: str, section: type[Section]) -> type[Section]:
    fields: dict[str, Any] = {name: (section, ...)}
    return create_model("Settings", __base__=_OneSection, **fields)


COMMANDS: dict[str, type[Section]] = {
    "data convert": ConvertSettings,
    "data structures": StructuresSettings,
    "train export": _alone("export", ExportSection),
    "train plan": _alone("plan", PlanSection),
    "profile model": _alone("profile", ModelProfileSection),
    "profile devices": _alone("profile", DeviceProfileSection),
    "profile log": _alone("profile", LogProfileSection),
    "embed run": EmbedSettings,
    "embed join": _alone("join", JoinSection),
    "embed search": _alone("search", SearchSection),
    "embed plot": _alone("plot", PlotSection),
    "classify predict": _alone("predict", ClassifyPredictSection),
    "classify evaluate": _alone("evaluate", ClassifyEvaluateSection),
    "mutations score": _alone("score", MutationScoreSection),
    "mutations scan": _alone("scan", MutationScanSection),
    "mutations fit": _alone("fit", MutationFitSection),
    "design generate": _alone("generate", GenerateSection),
    "design score": _alone("score", ScoreSection),
    "design evaluate": _alone("evaluate", DesignEvaluateSection),
    "design fold": FoldSettings,
    "function predict": PredictTermsSettings,
    "function evaluate": _alone("evaluate", EvaluateTermsSection),
    "align": AlignSettings,
    "serve run": ServiceSettings,
    "serve query": _alone("query", QuerySection),
    "serve key": _alone("key", KeySection),
}
"""The schema of each command, in the order of the pages."""
