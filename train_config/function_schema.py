"""Settings of function prediction: annotated proteins, and the predictors that are fitted to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from train_config.schema import IngestSection, SampleSection
from train_config.section import Channels, FolderName, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share

SAMPLE = "sample"
COMPOSITION = "composition"
Part = Literal["naive", "homology", "neighbours", "network"]
_PARTS: list[Part] = ["naive", "homology", "neighbours", "network"]


class FunctionSampleSection(SampleSection):
    """The embedded sample: an ontology of 500 terms, and families of sequences whose terms follow from motifs.
    A fifth of the sequences, with whole families among them, is for evaluation."""

    families: PositiveInt = 400
    """Families that sequences descend from."""


class FunctionDataSection(Section):
    """Annotated proteins, and which of them are held out to stop the network and to weight the blend."""

    sequences: list[str] = Field([SAMPLE], min_length=1)
    """FASTA files, folders, globs, or a store; or 'sample' for the embedded default."""
    annotations: str | None = None
    """Terms of these proteins: TSV of protein and term, or GAF 2.2. Those of proteins without sequence are left out and
    counted."""
    ontology: str | None = None
    """Ontology, OBO."""
    ia: str | None = None
    """TSV of term and information accretion. Default: computed from the annotations."""
    evidence: list[str] = Field([])
    """Evidence codes to take from GAF. Default: experimental ones."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Annotations with terms that the ontology does not have."""
    validation: str | None = None
    """File of the ids to hold out, one a line."""
    since: Annotated[str, Field(pattern=r"^(\d{8})?$")] = ""
    """Date, YYYYMMDD: hold out the proteins without an annotation before it. GAF alone has dates."""
    clusters: str | None = None
    """TSV of cluster and protein, as MMseqs2 writes it: hold out whole clusters, by a hash of their names."""
    validation_share: Share = 0.1
    """Share of clusters, or without them of distinct sequences, to hold out by hash."""
    ingest: IngestSection = IngestSection()
    sample: FunctionSampleSection = FunctionSampleSection()

    @model_validator(mode="after")
    def _fits_together(self) -> FunctionDataSection:
        if (self.sequences == [SAMPLE]) != (self.annotations is None) or bool(self.annotations) != bool(self.ontology):
            raise ValueError("sequences, annotations and ontology go together: set all three, or none for the sample")
        if sum(map(bool, (self.validation, self.since, self.clusters))) > 1:
            raise ValueError("validation, since and clusters exclude each other: set one of them")
        return self


class EmbeddingsSection(Section):
    """Vectors of proteins."""

    model: str = COMPOSITION
    """Folder or hub name of transformers, an Esmeray run, or its export, whose mean over residues is taken; or
    'composition': frequencies of amino acids, of pairs and of triples of like ones, which need no model."""
    store: str | None = None
    """Folder of embeddings of the sequences by this model, as embed made it. Default: computed here."""
    random_weights: bool = False
    """Take a size (esm2_t6_8M), whose weights are drawn, to try things out."""
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
    """Annotated proteins that are aligned to each query: those that share the most words of four residues, as align's
    prefilter kmer has it."""
    max_evalue: PositiveFloat = 1e-3
    """Largest E-value of a hit."""


class NeighboursSection(Section):
    """Terms of the nearest proteins in the space of embeddings."""

    number: PositiveInt = 10
    """Neighbours."""
    temperature: PositiveFloat = 0.05
    """A neighbour weighs exp(cosine / temperature)."""


class NetworkSection(Section):
    """Multi-label network for each aspect; binary cross-entropy weighted by information accretion."""

    min_count: PositiveInt = 10
    """Fewest training proteins of a term that is learnt."""
    classifier: str | None = None
    """YAML file of a classifier experiment, as train_ray.py takes it: the network is its backbone, trained end to end
    or by model.backbone.lora, with Ray and DeepSpeed. The settings below are those of the network on embeddings."""
    hidden_size: Channels = 512
    """Channels of the hidden layer."""
    dropout: Share = 0.3
    """Share of channels dropped in training."""
    learning_rate: PositiveFloat = 1e-3
    """Of AdamW."""
    batch_size: PositiveInt = 128
    """Proteins of a step."""
    epochs: PositiveInt = 50
    """Passes over the training proteins, at the most."""
    patience: PositiveInt = 5
    """Epochs without a smaller validation loss after which training stops."""


class FunctionConfig(Section):
    """Function prediction: data, and the parts of the blend."""

    name: FolderName = "function"
    """Folder of the run, in the storage path. The same name resumes the run."""
    storage_path: str = "runs"
    """Folder that holds the runs."""
    seed: NonNegativeInt = 0
    """Seed of the networks."""
    parts: list[Part] = Field(_PARTS, min_length=1)
    """Predictors that are blended. naive: frequency of terms; homology, neighbours and network as below."""
    data: FunctionDataSection = FunctionDataSection()
    embeddings: EmbeddingsSection = EmbeddingsSection()
    homology: HomologySection = HomologySection()
    neighbours: NeighboursSection = NeighboursSection()
    network: NetworkSection = NetworkSection()
