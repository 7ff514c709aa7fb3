"""Settings of the data: sources, labels, terms, structures, tokens and batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.natures import FIXED, PATH, UNSEEN
from esmeray.train_config.section import (
    DEFAULT_TOKENS,
    Channels,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Share,
    Tokens,
)

SPECIAL_TOKENS_PER_SEQUENCE = 2
"""<cls> and <eos>, which the ESM alphabet puts around every sequence."""

Part = Literal["all", "training", "validation", "test"]

TargetKind = Literal["multiclass", "binary", "multilabel", "regression", "per_residue"]

CaOnly = Literal["error", "skip", "complete"]

GafDate = Annotated[str, Field(pattern=r"^(\d{8})?$")]
"""YYYYMMDD, or empty."""


class SampleSection(Section):
    """The embedded sample, made by the project's own code when data.source is 'sample': protein families; for the
    classifier proteins of six locations in the cell or, where model.tokenizer.content is text, customers' messages."""

    records: Annotated[int, Field(gt=0, le=10_000_000)] = 2000
    """Proteins that the sample has."""
    families: PositiveInt = 50
    """Families that the sample's proteins descend from."""
    seed: NonNegativeInt = 0
    """Seed from which the sample is drawn."""


class IngestSection(Section):
    """Policies for records of a FASTA file that are not plain protein sequences."""

    duplicate_ids: Literal["error", "first", "rename"] = "error"
    """error: refuse; first: keep the first, count the others; rename: append .2, .3 ..."""
    bad_characters: Literal["error", "to_x", "skip"] = "error"
    """Characters outside the alphabet. error: refuse; to_x: replace by X; skip: drop the record. Each is counted."""
    empty_sequences: Literal["error", "skip"] = "error"
    """Headers without a sequence. error: refuse; skip: drop the record, counted."""
    nucleotides: Literal["warn", "error"] = "warn"
    """Records that look like DNA or RNA: 95 % of their letters are A, C, G, T, U or N. warn: count; error: refuse. A
    few short peptides alone are never counted."""
    max_residues: Annotated[int, Field(gt=0, le=2**31), UNSEEN] = 1_000_000
    """Most residues of a record; a longer one is refused while it is read. Titin, the longest protein, has 35,000."""

    def repairs(self) -> dict[str, str]:
        """The policies by name: what a store of the same files depends on, which no bound changes."""
        return self.model_dump(exclude={"max_residues"})


class LabelsSection(Section):
    """Labels of the source, for the classifier. Tables are CSV, TSV or Parquet; anything else is read as FASTA."""

    kind: TargetKind = "multiclass"
    """multiclass: one name of several; binary: one of two; multilabel: any number of names; regression: one or more
    numbers; per_residue: one letter for each residue, as in secondary structure."""
    unknown_letters: str = ".?-"
    """per_residue: letters that mean 'not known'; their residues are neither learnt nor scored, and counted. In DSSP
    strings '-' is a class of its own (coil): '.?' learns it."""
    header_pattern: str | None = None
    """FASTA: regular expression looked for in the whole header; its group 'label', or its first, is the label."""
    header_field: Annotated[int, Field(ge=1)] | None = None
    """FASTA: word of the header that is the label; the id is word 0."""
    labels_file: str | None = None
    """FASTA, per_residue: a FASTA file of the same ids, as biotrainer and FLIP have it, with a letter for each residue
    in place of the sequence."""
    mask_file: str | None = None
    """FASTA beside labels_file, with a 1 for each residue, or a 0 to neither learn nor score it."""
    id_column: str | None = None
    """Table: column of the ids. Default: row1, row2 ..."""
    text_column: str = "sequence"
    """Table: column of the sequence or text."""
    label_columns: list[str] = Field(default=["label"], min_length=1)
    """Table: columns of the labels. Several: one number each (regression), or one 0 or 1 each (multilabel)."""
    separator: str = Field(default=";", min_length=1)
    """Separator of the names of a multilabel target in one column or header. Lists of JSON or Python, as ["a", "b"],
    are read whatever it is."""
    weight_column: str | None = None
    """Table: column of the weight of each record in the loss."""
    split: Literal["hash", "stratified", "column", "files"] = "hash"
    """Choice of the held-out records. hash: data.validation_share of distinct sequences, by a hash; stratified: that
    share of each class; column: by split_column; files: validation_source."""
    split_column: str | None = None
    """Table: column of train, valid (or validation, val, dev) and test. labels_file: attribute of its headers with
    these values, such as SET of SET=train. A true value in a column or attribute 'validation' turns train into valid,
    as in FLIP; counted."""
    group_column: str | None = None
    """Table: column of a group of each record, such as a cluster of sequences. Splits hash and stratified then hold out
    whole groups in place of distinct sequences."""
    validation_source: Annotated[list[str], UNSEEN] = Field(default=[])
    """Labelled files to hold out, for split files."""
    unseen_labels: Literal["error", "skip"] = "error"
    """Labels of held-out records that no training record has. error: refuse; skip: leave these out, counted."""
    empty_texts: Literal["error", "skip"] = "error"
    """Records of a table without a sequence or text (blank, NA, NaN, null ...). error: refuse; skip: drop, counted."""
    missing_labels: Literal["error", "skip"] = "error"
    """Records without a label (blank, NA, NaN, null ...). error: refuse; skip: drop, counted."""
    not_missing: list[str] = Field(default=[])
    """Texts that are values, although tables mean a missing value by them, e.g. NA (neuraminidase). Of ids, names of
    classes and texts; sequences and numbers have no such value."""

    @model_validator(mode="after")
    def _fits_together(self) -> "LabelsSection":
        header = [setting for setting in (self.header_pattern, self.header_field) if setting is not None]
        # In this order: of several problems the first is named, which a user mends before the next.
        for is_wrong, problem in (
            (len(header) > 1, "header_pattern and header_field can't both be set: remove one"),
            (
                self.labels_file is not None and self.kind != "per_residue",
                f"labels_file is for kind per_residue, not for {self.kind}",
            ),
            (
                self.labels_file is not None and header,
                "labels_file and a place in the headers can't both be set: remove one",
            ),
            (
                self.mask_file is not None and self.labels_file is None,
                "mask_file goes with labels_file: set that, too, or remove it",
            ),
            (
                self.mask_file is not None and not self.unknown_letters,
                "mask_file needs a letter that means 'not known': set unknown_letters, as '.'",
            ),
            (
                (self.split == "column") != (self.split_column is not None),
                "split column and split_column go together: set both or neither",
            ),
            (
                (self.split == "files") != bool(self.validation_source),
                "split files and validation_source go together: set both or neither (none empties the list)",
            ),
            (
                self.group_column is not None and self.split not in ("hash", "stratified"),
                f"group_column is for split hash or stratified, not for {self.split}: remove one",
            ),
            (
                len(self.label_columns) > 1 and self.kind not in ("regression", "multilabel"),
                f"label_columns: several are for regression and multilabel, not for {self.kind}",
            ),
        ):
            if is_wrong:
                raise ValueError(problem)
        return self


class TermsDataSection(Section):
    """Terms of the proteins of data.source, and which proteins are held out to stop the network and to weight the
    blend: a share of them by data.validation_share, or as said here."""

    annotations: str | None = None
    """Table of proteins and terms, or GAF. Ids match the sequences' ids in any spelling, such as sp|P12345|NAME.
    Proteins without a sequence are left out and counted. None with data.source 'sample'."""
    ontology: str | None = None
    """OBO file of the ontology, as go-basic.obo."""
    ia: str | None = None
    """TSV of term and information accretion. Default: computed from the annotations."""
    evidence: list[str] = Field(default=[])
    """Evidence codes to take from GAF, and from a table that has some. Default: experimental ones."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Terms that the ontology does not have. refuse: name the line; ignore: leave out, counted."""
    min_count: PositiveInt = 10
    """Fewest training proteins of a term that the network learns."""
    validation: str | None = None
    """File of the ids to hold out, one a line."""
    since: GafDate = ""
    """Date, YYYYMMDD: hold out the proteins without an annotation before it. Only GAF has dates; a table is refused."""
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


class StructuresSection(Section):
    """Structure files of the source: PDB, mmCIF and BinaryCIF, also .gz."""

    chains: str = "each"
    """each: a record for each protein chain; first: the first of each file; complex: all chains of a file as one
    record; or names of chains, as A,B, a record for each."""
    min_residues: PositiveInt = 10
    """Chains of fewer residues with coordinates are left out and counted."""
    ca_only: CaOnly = "error"
    """Chains of which CA atoms alone are known. error: refuse; skip: leave out, counted; complete: place N, C and O."""
    predicted: bool | Literal["auto"] = "auto"
    """Treat the files as predictions, with a confidence (pLDDT, 0 to 100 or 0 to 1) as B-factor. auto: those with
    the title of AlphaFold or ESMFold, or a quality metric in mmCIF. ColabFold, Boltz (PDB), OmegaFold and a local
    AlphaFold write neither: set true."""
    max_bytes: Annotated[PositiveInt, UNSEEN] = 1_000_000_000
    """Most bytes of a file, uncompressed; a larger one is refused while it is read."""
    max_atoms: Annotated[PositiveInt, UNSEEN] = 5_000_000
    """Most atoms of a file's models that are read, twice those of the largest entry of the PDB."""
    labels: str | None = None
    """CSV or TSV file with columns id and label: classes to condition on."""
    validation_source: list[str] = Field(default=[])
    """Structure files, folders or globs to hold out, in place of data.validation_share."""


class PredictionsSection(Section):
    """Predicted structures of sequences that have none of their own. With ``model`` they are predicted beside training,
    on Ray, in the order in which it wants them."""

    folder: Annotated[str | None, PATH] = None
    """Folder of predictions, as 'esmeray design fold' makes it."""
    on_miss: Literal["error", "null", "wait"] = "error"
    """Sequences without a prediction. error: refuse; null: train without their structure; wait: until it is there, if
    they are no longer than data.max_length."""
    model: str | None = None
    """Folder or hub name of the predictor's weights. none: nobody predicts beside training."""
    predictor: str = "esmfold"
    """Kind of predictor: esmfold, esmfold2, or one of predictor_module."""
    predictor_module: list[str] = Field(default=[])
    """Modules to import, which register further kinds."""
    workers: PositiveInt = 1
    """Actors that predict structures beside training."""
    cpus_per_worker: NonNegativeInt = 0
    """CPU cores that are reserved for an actor, beside those of training."""
    gpus_per_worker: NonNegativeFloat = 1.0
    """GPUs of an actor where the cluster has some; they must be free beside those of training."""
    tokens: PositiveInt = 1024
    """Residues of a batch of predictions, at most."""

    @model_validator(mode="after")
    def _fits_together(self) -> "PredictionsSection":
        if self.folder is None and (self.on_miss != "error" or self.model is not None):
            raise ValueError("on_miss and model need a folder that keeps predictions: set folder, too")
        if self.on_miss == "error" and self.model is not None:
            raise ValueError("with a predictor beside training set on_miss to wait or null")
        return self


class DataSection(Section):
    """From files to packed batches."""

    source: Annotated[list[str], UNSEEN] = Field(default=["sample"], min_length=1)
    """FASTA files (plain, .gz, .bz2, .xz, .zst), for the classifier also CSV, TSV and Parquet, for diffusion PDB, mmCIF
    and BinaryCIF; folders or globs; each also as a URI (s3://, gs://, hf://); or 'sample' for the embedded default."""
    store: Annotated[str | None, UNSEEN] = None
    """Folder of the LMDB store. Default: made from the source, in the storage path."""
    stage_dir: Annotated[str | None, UNSEEN, PATH] = None
    """Node-local folder to copy the store to before reading. LMDB must not be read over a network file system."""
    max_length: Annotated[Tokens, FIXED] = 1022
    """Residues, or tokens of a text. Longer sequences are cropped at random in training and at the start in validation,
    and counted; for the classifier as data.crop says."""
    crop: Annotated[Literal["random", "start", "ends"], FIXED] = "random"
    """Part of longer sequences that the classifier uses. random: a window, in validation the start; start; ends: half
    from the start and half from the end, for signals at a protein's ends, such as those of its location."""
    validation_share: Annotated[Share, FIXED] = 0.05
    """Share of distinct sequences held out, chosen by a hash of the sequence."""
    num_workers: Annotated[int, Field(ge=0, le=1024), UNSEEN] = 1
    """Loader processes per training worker; 0 loads in the worker itself, as do cached features of a frozen backbone
    and data.predictions always."""
    prefetch: Annotated[Channels, UNSEEN] = 4
    """Batches that each loader process prepares ahead."""
    ingest: IngestSection = IngestSection()
    labels: Annotated[LabelsSection, FIXED] = LabelsSection()
    terms: Annotated[TermsDataSection, UNSEEN] = TermsDataSection()
    structures: StructuresSection = StructuresSection()
    predictions: PredictionsSection = PredictionsSection()
    sample: SampleSection = SampleSection()


class TokenizerSection(Section):
    """From texts to tokens."""

    source: str = "auto"
    """auto: that of the backbone's folder or hub name; for random weights the ESM alphabet for proteins, and 'train'
    for text. train: byte-pair encoding of the training texts. Else a local folder or a hub name."""
    vocabulary_size: Tokens = 4096
    """Tokens that 'train' makes, special ones included; fewer where the texts give no more."""
    content: Literal["protein", "text"] = "protein"
    """protein: residues, checked and upper-cased as for any store; text: anything in Unicode."""
    spaced: bool | Literal["auto"] = "auto"
    """Put blanks between residues, as ProtBERT wants. auto: where the vocabulary asks for it."""


class BatchSection(Section):
    """Tokens, and at most how many sequences, of a step. Special tokens are counted."""

    tokens: Tokens = DEFAULT_TOKENS
    """Token budget of one packed batch, which one worker takes at once."""
    global_tokens: Annotated[int, Field(gt=0, le=2**30)] = 32768
    """Token budget of one optimizer step over all workers, a multiple of batch.tokens; gradients accumulate to it,
    whatever the number of workers."""
    first_global_tokens: Annotated[int | None, Field(gt=0, le=2**30)] = None
    """Tokens of the first step, at most global_tokens, to which they rise linearly, in whole packed batches. none:
    global_tokens throughout."""
    ramp_steps: PositiveInt = 1000
    """Steps in which first_global_tokens rises to global_tokens."""
    batch_size: Tokens | None = None
    """Most sequences in one packed batch, whatever room its tokens leave: for heads and losses whose memory grows with
    sequences. A step then has fewer tokens than global_tokens. None: the token budget alone."""
    packing_window: PositiveInt = 2048
    """Sequences that packing looks at together. Larger fills better, smaller shuffles better."""

    @model_validator(mode="after")
    def _whole_batches_per_step(self) -> "BatchSection":
        if self.global_tokens % self.tokens:
            multiple = max(1, round(self.global_tokens / self.tokens)) * self.tokens
            raise ValueError(
                f"global_tokens ({self.global_tokens}) must be a multiple of tokens ({self.tokens}); "
                f"the nearest is {multiple}"
            )
        if (self.first_global_tokens or 0) > self.global_tokens:
            raise ValueError(f"first_global_tokens must not exceed global_tokens ({self.global_tokens})")
        return self

    def ramp(self, first_step: int = 0) -> list[int]:
        """Packed batches over all workers of each step from this one on, until they are :attr:`batches_per_step`."""
        if self.first_global_tokens is None:
            return []
        most = self.batches_per_step
        first = max(1, self.first_global_tokens // self.tokens)
        return [first + (most - first) * step // self.ramp_steps for step in range(first_step, self.ramp_steps)]

    @property
    def more_steps(self) -> int:
        """Steps that training takes more than with global_tokens throughout."""
        sizes = self.ramp()
        return len(sizes) - sum(sizes) // self.batches_per_step

    @property
    def batches_per_step(self) -> int:
        """Packed batches that one optimizer step consumes over all workers."""
        return self.global_tokens // self.tokens
