"""Settings of the data: sources, labels, terms, structures, tokens and batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.section import DEFAULT_TOKENS, FIXED, PATH, UNSEEN, PositiveInt, Section, Share, Tokens

SPECIAL_TOKENS_PER_SEQUENCE = 2
"""<cls> and <eos>, which the ESM alphabet puts around every sequence."""

Part = Literal["all", "training", "validation", "test"]

TargetKind = Literal["multiclass", "binary", "multilabel", "regression", "per_residue"]

CaOnly = Literal["error", "skip", "complete"]

GafDate = Annotated[str, Field(pattern=r"^(\d{8})?$")]
"""Date as YYYYMMDD, or empty."""


class SampleSection(Section):
    """Embedded sample, generated if data.source is 'sample': protein families; for the classifier, proteins of six
    locations in the cell or, if model.tokenizer.content is text, customers' messages."""

    records: Annotated[int, Field(gt=0, le=10_000_000)] = 2000
    """Number of proteins in the sample."""
    families: PositiveInt = 50
    """Number of families in the sample."""


class IngestSection(Section):
    """Policies for FASTA records that are not plain protein sequences."""

    duplicate_ids: Literal["error", "first", "rename"] = "error"
    """Ids that repeat. error: refuse; first: keep the first record, count the others; rename: append .2, .3 ..."""
    bad_characters: Literal["error", "to_x", "skip"] = "error"
    """Characters outside the alphabet. error: refuse; to_x: replace by X; skip: drop the record. All are counted."""
    empty_sequences: Literal["error", "skip"] = "error"
    """Headers without a sequence. error: refuse; skip: drop the record, counted."""
    nucleotides: Literal["warn", "error"] = "warn"
    """Records that look like DNA or RNA: at least 95 % of the letters are A, C, G, T, U or N. warn: count; error:
    refuse. With warn, a few short peptides alone are never counted."""


class LabelsSection(Section):
    """Labels of the source, for the classifier. Tables are CSV, TSV or Parquet; other files are read as FASTA."""

    kind: TargetKind = "multiclass"
    """Kind of label. multiclass: one name of several; binary: one of two; multilabel: any number of names; regression:
    one or more numbers; per_residue: one letter per residue, e.g. secondary structure."""
    unknown_letters: str = ".?-"
    """per_residue: letters that mean 'not known'. Their residues are neither learnt nor scored, and are counted. In
    DSSP strings '-' is a class of its own (coil); set '.?' to learn it."""
    header_pattern: str | None = None
    """FASTA: regular expression searched in the whole header; its group 'label', or its first group, is the label."""
    header_field: Annotated[int, Field(ge=1)] | None = None
    """FASTA: index of the header's word that is the label; the id is word 0."""
    labels_file: str | None = None
    """FASTA, per_residue: FASTA file with the same ids and a letter per residue in place of the sequence, as in
    biotrainer and FLIP."""
    mask_file: str | None = None
    """FASTA: file in addition to labels_file, with a 1 per residue, or a 0 to neither learn nor score it."""
    id_column: str | None = None
    """Table: column of ids. Default: row1, row2 ..."""
    text_column: str = "sequence"
    """Table: column of the sequence or text."""
    label_columns: list[str] = Field(default=["label"], min_length=1)
    """Table: columns of labels. Several columns: a number in each (regression), or a 0 or 1 in each (multilabel)."""
    separator: str = Field(default=";", min_length=1)
    """Separator of names in a multilabel column or header. Lists in JSON or Python syntax, e.g. ["a", "b"], are
    recognized with any separator."""
    split: Literal["hash", "stratified", "clusters", "column", "files"] = "hash"
    """Method of the training/validation split. hash: data.validation_share of distinct sequences, by a hash;
    stratified: that share of each class; clusters: about that share of each class, in whole clusters of similar
    proteins; column: by split_column; files: validation_source is held out."""
    identity: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Split clusters: proteins with at least this share of identical residues, in an alignment over 80 % of both, get
    into the same cluster, and so do all proteins that a chain of such pairs connects."""
    split_column: str | None = None
    """Table: column with the values train, valid (or validation, val, dev) and test. labels_file: attribute of the
    headers with these values, e.g. SET for SET=train. A true value in a column or attribute 'validation' turns train
    into valid, as in FLIP; counted."""
    group_column: str | None = None
    """Table: column with a group per record, e.g. a sequence cluster. Splits hash and stratified then hold out whole
    groups in place of distinct sequences."""
    validation_source: Annotated[list[str], UNSEEN] = Field(default=[])
    """Labelled files to hold out, for split files."""
    unseen_labels: Literal["error", "skip"] = "error"
    """Labels of held-out records that no training record has. error: refuse; skip: drop these records, counted."""
    empty_texts: Literal["error", "skip"] = "error"
    """Records of a table without a sequence or text (blank, NA, NaN, null ...). error: refuse; skip: drop, counted."""
    missing_labels: Literal["error", "skip"] = "error"
    """Records without a label (blank, NA, NaN, null ...). error: refuse; skip: drop, counted."""
    not_missing: list[str] = Field(default=[])
    """Texts that are values although tables use them for missing values, e.g. NA (neuraminidase). Applies to ids, names
    of classes and texts, not to sequences and numbers."""

    @model_validator(mode="after")
    def _fits_together(self) -> "LabelsSection":
        header = [setting for setting in (self.header_pattern, self.header_field) if setting is not None]
        # The order matters: only the first problem is reported.
        for is_wrong, problem in (
            (len(header) > 1, "header_pattern and header_field can't both be set: remove one"),
            (
                self.labels_file is not None and self.kind != "per_residue",
                f"labels_file needs kind per_residue, not {self.kind}",
            ),
            (
                self.labels_file is not None and header,
                "labels_file can't be combined with header_field or header_pattern: remove one",
            ),
            (
                self.mask_file is not None and self.labels_file is None,
                "mask_file needs labels_file: set labels_file too, or remove mask_file",
            ),
            (
                self.mask_file is not None and not self.unknown_letters,
                "mask_file needs a letter that means unknown: set unknown_letters, e.g. '.'",
            ),
            (
                (self.split == "column") != (self.split_column is not None),
                "split column needs split_column, and split_column needs split column: set both or neither",
            ),
            (
                (self.split == "files") != bool(self.validation_source),
                "split files needs validation_source, and validation_source needs split files: set both or neither "
                "(none empties the list)",
            ),
            (
                self.group_column is not None and self.split not in ("hash", "stratified"),
                f"group_column needs split hash or stratified, not {self.split}: remove one",
            ),
            (
                len(set(self.label_columns)) < len(self.label_columns),
                f"label_columns: {', '.join(self.label_columns)}: a column is listed twice; remove one",
            ),
            (
                len(self.label_columns) > 1 and self.kind not in ("regression", "multilabel"),
                f"label_columns: several columns need kind regression or multilabel, not {self.kind}",
            ),
        ):
            if is_wrong:
                raise ValueError(problem)
        return self


class TermsDataSection(Section):
    """Terms of the proteins of data.source, and the held-out proteins, which stop the network and weight the blend.
    They are chosen by data.validation_share, or by validation, since or clusters."""

    annotations: str | None = None
    """Table of proteins and terms, or GAF. Ids match the sequences' ids in any spelling, e.g. sp|P12345|NAME. Proteins
    without a sequence are left out and counted. Not set for data.source 'sample'."""
    ontology: str | None = None
    """OBO file of the ontology, e.g. go-basic.obo."""
    ia: str | None = None
    """TSV of term and information accretion. Default: computed from the annotations."""
    evidence: list[str] = Field(default=[])
    """Evidence codes to use, for GAF and for tables with evidence. Default: experimental codes."""
    unknown: Literal["refuse", "ignore"] = "refuse"
    """Terms that are missing from the ontology. refuse: report the line; ignore: leave out, counted."""
    min_count: PositiveInt = 10
    """Minimum number of training proteins of a term that the network learns."""
    validation: str | None = None
    """File of ids to hold out, one per line."""
    since: GafDate = ""
    """Date, YYYYMMDD: hold out proteins without an earlier annotation. Only GAF has dates; tables are refused."""
    clusters: str | None = None
    """TSV of cluster and protein, as written by MMseqs2: hold out data.validation_share of whole clusters, by a hash of
    their names."""

    @model_validator(mode="after")
    def _fits_together(self) -> "TermsDataSection":
        if bool(self.annotations) != bool(self.ontology):
            raise ValueError("annotations and ontology must both be set, or neither to use the sample")
        if sum(map(bool, (self.validation, self.since, self.clusters))) > 1:
            raise ValueError("validation, since and clusters are mutually exclusive: set only one")
        return self


class StructuresSection(Section):
    """Structure files of the source: PDB, mmCIF and BinaryCIF, also .gz."""

    chains: str = "each"
    """Chains of a file. each: one record per protein chain; first: the first chain; complex: all chains as one record;
    or names of chains, e.g. A,B: one record per named chain."""
    ca_only: CaOnly = "error"
    """Chains with CA atoms only. error: refuse; skip: leave out, counted; complete: place N, C and O."""
    predicted: bool | Literal["auto"] = "auto"
    """Treat the files as predictions, with a confidence (pLDDT, 0 to 100 or 0 to 1) as B-factor. auto: files with the
    title of AlphaFold or ESMFold, or a quality metric in mmCIF. ColabFold, Boltz (PDB), OmegaFold and a local AlphaFold
    write neither: set true."""
    labels: str | None = None
    """CSV or TSV file with columns id and label: classes to condition on."""
    validation_source: list[str] = Field(default=[])
    """Structure files, folders or globs to hold out, in place of data.validation_share."""


class PredictionsSection(Section):
    """Predicted structures for sequences without one. If ``model`` is set, a Ray actor predicts them during training,
    in the order in which training needs them, on a GPU if the cluster has GPUs."""

    folder: Annotated[str | None, PATH] = None
    """Folder of predictions, as written by 'esmeray design fold'."""
    on_miss: Literal["error", "null", "wait"] = "error"
    """Sequences without a prediction. error: refuse; null: train without their structure; wait: wait for the prediction
    if they are no longer than data.max_length."""
    model: str | None = None
    """Folder or hub name of the predictor's weights. none: no predictions during training."""
    predictor: str = "esmfold"
    """Kind of predictor: esmfold, esmfold2, or MODULE:KIND, a kind that an imported module registers."""

    @model_validator(mode="after")
    def _fits_together(self) -> "PredictionsSection":
        if self.folder is None and (self.on_miss != "error" or self.model is not None):
            raise ValueError("on_miss and model need a folder to store predictions in: set folder too")
        if self.on_miss == "error" and self.model is not None:
            raise ValueError("a predictor that runs during training needs on_miss wait or null")
        return self


class DataSection(Section):
    """Data from files to packed batches."""

    source: Annotated[list[str], UNSEEN] = Field(default=["sample"], min_length=1)
    """FASTA files (plain, .gz, .bz2, .xz, .zst); for the classifier also CSV, TSV and Parquet; for diffusion PDB, mmCIF
    and BinaryCIF. Files, folders, globs or URIs (s3://, gs://, hf://); or 'sample' for the embedded default."""
    store: Annotated[str | None, UNSEEN] = None
    """Folder of the LMDB store. Default: made from the source, in the storage path."""
    stage_dir: Annotated[str | None, UNSEEN, PATH] = None
    """Node-local folder to copy the store to before reading. LMDB must not be read over a network file system."""
    max_length: Annotated[Tokens, FIXED] = 1022
    """Maximum residues, or tokens of a text. Longer sequences are counted and cropped: to a random window in training,
    to the start in validation; for the classifier see data.crop."""
    crop: Annotated[Literal["random", "start", "ends"], FIXED] = "random"
    """Part of longer sequences that the classifier uses. random: a random window, in validation the start; start: the
    start; ends: half from either end, for signals at a protein's ends, e.g. for its location."""
    validation_share: Annotated[Share, FIXED] = 0.05
    """Share of distinct sequences to hold out, chosen by a hash of the sequence."""
    num_workers: Annotated[int, Field(ge=0, le=1024), UNSEEN] = 1
    """Loader processes per training worker. 0: load in the worker itself; always so for cached features of a frozen
    backbone and for data.predictions."""
    ingest: IngestSection = IngestSection()
    labels: Annotated[LabelsSection, FIXED] = LabelsSection()
    terms: Annotated[TermsDataSection, UNSEEN] = TermsDataSection()
    structures: StructuresSection = StructuresSection()
    predictions: PredictionsSection = PredictionsSection()
    sample: SampleSection = SampleSection()


class TokenizerSection(Section):
    """Tokenizer of proteins or texts. A trained backbone has its own; with random weights it is the ESM alphabet for
    proteins, and trained for texts."""

    vocabulary_size: Annotated[int, Field(ge=258, le=2**24)] = 4096
    """Tokens of the byte-pair encoding that is trained on the texts if the backbone has random weights. It includes the
    256 bytes and two special tokens, and has fewer if there are not enough texts."""
    content: Literal["protein", "text"] = "protein"
    """protein: residues, checked and upper-cased as in all stores; text: any Unicode."""


class BatchSection(Section):
    """Sizes of micro-batches and steps, in tokens and sequences. Special tokens are counted."""

    tokens: Tokens = DEFAULT_TOKENS
    """Token budget of a micro-batch, which one worker processes at once."""
    global_tokens: Annotated[int, Field(gt=0, le=2**30)] = 32768
    """Token budget of an optimizer step over all workers (global batch), a multiple of batch.tokens. Gradients
    accumulate to it, for any number of workers."""
    first_global_tokens: Annotated[int | None, Field(gt=0, le=2**30)] = None
    """Token budget of the first step, at most global_tokens. It rises linearly to global_tokens, by whole
    micro-batches. none: global_tokens for all steps."""
    ramp_steps: PositiveInt = 1000
    """Number of steps in which first_global_tokens rises to global_tokens."""
    batch_size: Tokens | None = None
    """Maximum sequences of a micro-batch, for heads and losses whose memory grows with sequences. A step then has fewer
    tokens than global_tokens. none: only the token budget limits it."""

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
        """Return the micro-batches over all workers per step, from ``first_step`` to the end of the ramp."""
        if self.first_global_tokens is None:
            return []
        most = self.batches_per_step
        first = max(1, self.first_global_tokens // self.tokens)
        return [first + (most - first) * step // self.ramp_steps for step in range(first_step, self.ramp_steps)]

    @property
    def more_steps(self) -> int:
        """Number of additional training steps due to the ramp, compared with global_tokens throughout."""
        sizes = self.ramp()
        return len(sizes) - sum(sizes) // self.batches_per_step

    @property
    def batches_per_step(self) -> int:
        """Number of micro-batches per optimizer step over all workers."""
        return self.global_tokens // self.tokens
