"""Every setting of Esmeray: one typed tree that checks the YAML file, the command line and what a checkpoint recorded.

A function takes the section that it needs, never the whole tree. The text below a setting describes it and names its
unit; the command line's help and docs/config.md are generated from it.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, create_model, model_validator

from esmeray.common.remote import use
from esmeray.installation import added
from esmeray.train_config.classifier_schema import ClassifierSection, LabelsSection, LoraSection, TokenizerSection
from esmeray.train_config.diffusion_schema import DiffusionSection, PredictionsSection, StructuresSection
from esmeray.train_config.natures import END, FIXED, PATH, PATH_OR_NAME, SHIPPED_PATH, UNSEEN, with_absolute_paths
from esmeray.train_config.section import (
    DEFAULT_TOKENS,
    Channels,
    FolderName,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    Precision,
    Section,
    Share,
    Tokens,
)
from esmeray.train_config.terms_schema import TermsDataSection, TermsSection

Percent = Annotated[float, Field(ge=0, le=100)]
SPECIAL_TOKENS_PER_SEQUENCE = 2
"""<cls> and <eos>, which the ESM alphabet puts around every sequence."""


class RunSection(Section):
    """Name of the run and place of its files."""

    name: FolderName = "esm2ae"
    """Name of the run and of its folder. The same name resumes the run."""
    storage_path: Annotated[str, UNSEEN, PATH] = "runs"
    """Folder that holds the runs; on a cluster, one that every node sees, or a URI such as s3://bucket/runs."""
    resume: Annotated[Literal["must", "allow", "never"], UNSEEN] = "allow"
    """must: resume or fail; allow: resume where there is a checkpoint; never: refuse a run that exists."""
    seed: Annotated[NonNegativeInt, FIXED] = 0
    """Seed of weights, shuffling, cropping and masking."""


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


class DataSection(Section):
    """From files to packed batches."""

    source: Annotated[list[str], UNSEEN] = Field(["sample"], min_length=1)
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


class BackboneSection(Section):
    """Network that gives each token a feature vector: ESM-2, ESM C or another encoder or decoder of transformers."""

    source: Annotated[str, PATH_OR_NAME] = "esm2_t6_8M"
    """Folder, run, URI of one, or hub name (weights are loaded), or a size with random weights: esm2_t6_8M,
    esm2_t12_35M, esm2_t30_150M, esm2_t33_650M, esm2_t36_3B, esm2_t48_15B; or esmc (ESM C), modernbert, bert, qwen2,
    llama or t5 with random weights of the size given by layers, hidden_size and heads."""
    layers: Channels | None = None
    """Layers, in place of the size's own (random weights only)."""
    hidden_size: Channels | None = None
    """Channels, in place of the size's own (random weights only)."""
    heads: Channels | None = None
    """Attention heads, in place of the size's own (random weights only)."""
    frozen: bool = False
    """Train only what comes after the backbone."""
    padded: bool = False
    """Give the network padded batches, for architectures that packed attention does not know. T5 always gets them: its
    relative positions are a bias of the scores."""
    cache_features: bool = True
    """Compute the features of a frozen backbone once, keep them on disk and train the classifier's head from them.
    Longer sequences must then be cropped at the start or ends, as data.crop says."""
    lora: LoraSection = LoraSection()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each layer learns at this share of the rate of the one after it; 1 is the same rate for all."""
    gradient_checkpointing: Annotated[bool | Literal["selective"], UNSEEN] = False
    """Recompute activations in the backward pass. true: all of a layer, for a fifteenth of their memory and a third
    more time; selective, for ESM-2: all but matrix products and attention, for 60 % of the memory, in a few percent
    more time."""


class MaskedLMSection(Section):
    """Masked language modelling (Devlin et al. 2019; the shares are those of ESM-2, Lin et al. 2023)."""

    mask_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the residues that are to be predicted."""
    first_mask_share: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of residues to predict in the first step, from where it moves linearly to mask_share, with which validation
    masks always. none: mask_share throughout."""
    mask_share_steps: PositiveInt = 10_000
    """Steps in which first_mask_share moves to mask_share."""
    mask_token_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of the residues to predict that is replaced by <mask>."""
    random_token_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the residues to predict that is replaced by a random residue; the rest stay."""

    @model_validator(mode="after")
    def _shares_fit(self) -> "MaskedLMSection":
        if self.mask_token_share + self.random_token_share > 1 + 1e-9:
            raise ValueError("mask_token_share + random_token_share must not exceed 1")
        return self

    def at(self, step: int | None) -> "MaskedLMSection":
        """The shares of a step of training (from 0); None for validation."""
        if self.first_mask_share is None or step is None or step >= self.mask_share_steps:
            return self
        progress = step / self.mask_share_steps
        share = self.first_mask_share + (self.mask_share - self.first_mask_share) * progress
        return self.model_copy(update={"mask_share": share})


class AutoencoderSection(Section):
    """The ESM-2 autoencoder: features of each residue to a latent and back."""

    hidden_sizes: list[Channels] = Field([768, 512, 256, 128], min_length=1)
    """Channels after each bias-free layer of the encoder; the last is the latent. The decoder mirrors them."""
    feature_loss_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared error of the normalised features."""
    cosine_loss_weight: NonNegativeFloat = 0.0
    """Weight of 1 - cosine between normalised features and their reconstruction."""
    residue_loss_weight: NonNegativeFloat = 1.0
    """Weight of the cross entropy of the residues decoded from the latent."""
    normalization_tokens: PositiveInt = 65536
    """Tokens from which the per-channel mean and scale of the features are measured before the first step."""

    @model_validator(mode="after")
    def _some_loss(self) -> "AutoencoderSection":
        if self.feature_loss_weight + self.cosine_loss_weight + self.residue_loss_weight == 0:
            raise ValueError("at least one of the loss weights must be above 0")
        return self


class ModelSection(Section):
    """The model."""

    task: Literal["autoencoder", "masked_lm", "classifier", "diffusion", "terms"] = "autoencoder"
    """autoencoder: compress and reconstruct residue features; masked_lm: predict masked residues; classifier: predict
    the labels of data.labels; diffusion: generate sequences for structures; terms: predict functions of proteins."""
    backbone: BackboneSection = BackboneSection()
    tokenizer: TokenizerSection = TokenizerSection()
    classifier: ClassifierSection = ClassifierSection()
    autoencoder: AutoencoderSection = AutoencoderSection()
    masked_lm: MaskedLMSection = MaskedLMSection()
    diffusion: DiffusionSection = DiffusionSection()
    terms: TermsSection = TermsSection()


def _with_added_tasks(section: Any) -> Any:
    """The section with those of tasks of other packages, which are their entry points of ``esmeray.sections``."""
    sections = added("sections")
    if not sections:
        return section
    task = section.model_fields["task"]
    names = (*get_args(task.annotation), *sections)
    fields: dict[str, Any] = {name: (kind, kind()) for name, kind in sections.items()}
    fields["task"] = (Literal[names], Field(task.default, description=task.description))
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


if not TYPE_CHECKING:
    ModelSection = _with_added_tasks(ModelSection)


class MemoryGuardSection(Section):
    """Handling of out of memory while training."""

    enabled: bool = True
    """Repeat the step that ran out of memory with its batches in halves, and keep the halves: the optimizer's step and
    its result stay the same. Where workers already wait for each other, resume from the last checkpoint."""
    max_halvings: NonNegativeInt = 3
    """Times that batches may be halved in a run."""


class MuonSection(Section):
    """Muon (Jordan et al. 2024), of the matrices of the backbone's layers where training.optimizer is muon."""

    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of these matrices, which follows training.schedule; training.learning_rate is that of the
    rest."""
    momentum: Share = 0.95
    """Decay rate of Muon's momentum."""
    warmup_momentum: Share = 0.85
    """Decay rate of Muon's momentum at the first step, from where it rises linearly to momentum."""
    momentum_warmup_steps: NonNegativeInt = 300
    """Steps in which warmup_momentum rises to momentum."""


class TrainingSection(Section):
    """The optimisation."""

    epochs: Annotated[PositiveInt, END] = 1
    """Passes over the training sequences."""
    max_steps: Annotated[PositiveInt | None, END] = None
    """Optimizer steps after which to stop, in place of epochs."""
    optimizer: Annotated[Literal["adamw", "muon"], FIXED] = "adamw"
    """adamw; muon: Muon for the matrices of the backbone's layers, AdamW for embeddings, norms, biases and heads, under
    ZeRO-0 to 2 without offloading."""
    muon: MuonSection = MuonSection()
    learning_rate: PositiveFloat = 4e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine, linear: decay until the end; wsd: stable, then a linear decay, which a
    run that is given more steps later takes back; constant: no decay."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps, at the end, in which wsd decays."""
    min_learning_rate_share: Share = 0.1
    """Share of the peak that the rate decays to."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up, fewer than those of the run. Default: a tenth of these; wsd has to be given a number,
    the same however long the run becomes."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW, which keeps a step finite where a gradient is 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of AdamW and Muon; biases and norms are left out."""
    weight_mean: Annotated[float | None, Field(gt=0, lt=1), FIXED] = None
    """Decay rate of an exponential mean of the weights, such as 0.999, at most (1 + step) / (10 + step): a part of each
    checkpoint, for train export --export.weights mean (ZeRO-1 to 3). none: no mean."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    precision: Annotated[Precision, FIXED] = "bf16"
    """Precision of the forward and backward pass; fp16 scales the loss. Optimizer state is fp32 in each.
    On a processor without instructions for bf16, and without a GPU, fp32 is the default: bf16 is thirty times slower
    there."""
    tf32: bool = True
    """Use TF32 for what remains fp32 on CUDA."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its kernels on each new shape and keep the fastest. For convolutions whose shapes repeat; packed
    batches rarely have the same twice."""
    compile: bool | None = None
    """Compile the encoder layers with torch.compile: a third of the memory traffic between matrix products, for some
    seconds at the first step. Default: on CUDA, under ZeRO-0 to 2."""
    fp8: bool = False
    """Matrix products of the layers in FP8, by torchao, on NVIDIA Hopper and later: for models of 650M and more."""
    deterministic: bool = False
    """Refuse CUDA kernels whose result depends on timing."""
    evaluate_every_steps: PositiveInt = 200
    """Steps between evaluations on the held-out sequences; more come before the first and after last."""
    evaluation_batches: PositiveInt = 32
    """Packed batches, over all workers, that an evaluation looks at."""
    max_nonfinite_steps: PositiveInt = 5
    """Steps in a row with a NaN or infinite loss or gradient after which training diverged; fewer are skipped and
    counted."""
    on_divergence: Literal["stop", "rewind"] = "stop"
    """stop: end the run; rewind: return to the weights of the newest checkpoint before the steps that were not finite,
    and leave out the batches since then."""
    max_rewinds: PositiveInt = 3
    """Times that a run is rewound; then it ends."""
    checksum_every_steps: Annotated[PositiveInt | None, UNSEEN] = None
    """Steps between comparisons of the weights over the workers (ZeRO-0 to 2), beside one before each checkpoint; where
    they differ, training starts again from the newest checkpoint. none: never."""
    log_every_steps: Annotated[PositiveInt, UNSEEN] = 1
    """Steps between lines of metrics.jsonl."""
    gpu_log_interval: Annotated[NonNegativeFloat, UNSEEN] = 5.0
    """Seconds between samples of GPUs, host and worker, in the run's monitoring folder; 0 for none."""
    cpu_memory_limit_mib: Annotated[PositiveFloat | None, UNSEEN] = None
    """Memory that a worker's process may take on the CPU, MiB, where it stands in for a GPU's: beyond it the
    worker counts as out of memory."""
    memory_guard: Annotated[MemoryGuardSection, UNSEEN] = MemoryGuardSection()
    watchdog_s: Annotated[PositiveFloat | None, UNSEEN] = 600.0
    """Seconds without progress after which a worker on Ray saves its threads' stacks and ends, to be started again; the
    first step, a checkpoint and the export may take five times as long. none: wait for ever."""

    @model_validator(mode="after")
    def _warm_up_of_any_length(self) -> "TrainingSection":
        if self.schedule == "wsd" and self.warmup_steps is None:
            raise ValueError("schedule wsd: set warmup_steps, as a tenth of the steps would change with their number")
        return self

    @model_validator(mode="after")
    def _repeatable_kernels(self) -> "TrainingSection":
        if self.deterministic and self.cudnn_benchmark:
            raise ValueError(
                "cudnn_benchmark chooses kernels by timing them, which deterministic forbids: set one of them to false"
            )
        return self


class DeepSpeedSection(Section):
    """DeepSpeed ZeRO."""

    config: Annotated[str, UNSEEN, SHIPPED_PATH] = "train_config/zero2.yaml"
    """DeepSpeed's own settings as YAML. It may not have what Esmeray sets (batch sizes, precision, optimizer,
    clipping)."""
    stage: Annotated[Annotated[int, Field(ge=0, le=3)] | None, FIXED] = None
    """ZeRO stage 0 to 3, in place of the file's."""
    offload_optimizer: Annotated[bool, FIXED] = False
    """Keep the optimizer state in host memory (stages 1 to 3)."""


class CheckpointSection(Section):
    """Checkpoints to resume a run from."""

    every_steps: PositiveInt = 200
    """Steps between checkpoints; one more comes at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """Checkpoints with the best validation loss to keep as well."""
    asynchronous: bool = True
    """Write and hash checkpoints in the background while training continues."""
    memory_every_steps: PositiveInt | None = None
    """Steps between copies of the state in the host's /dev/shm, from which training resumes when a worker is lost and
    its machine is not; the newest two are kept until the run ends. none: on the disk alone."""
    memory_limit_gib: PositiveFloat | None = None
    """The most that these copies may take on a machine, GiB. Default: what /dev/shm has free at the start."""


class StorageSection(Section):
    """Stores of objects: sources, models, runs and results may be URIs (s3://, gs://, hf://, file://)."""

    cache_folder: Annotated[str | None, PATH] = None
    """Folder on each node's own disk for copies of sources, and for runs while they train. Default: esmeray/storage in
    XDG_CACHE_HOME or ~/.cache."""
    cache_gb: PositiveFloat = 100.0
    """Size of the copies; beyond it the least recently used are removed."""
    patience_s: PositiveFloat = 3600.0
    """Seconds that a store may be away during a run, or at its end."""

    def apply(self) -> None:
        """Follow these settings in this process and those that it starts."""
        use(**with_absolute_paths(self).model_dump())


class RaySection(Section):
    """The cluster."""

    address: str | None = None
    """Ray cluster, as HOST:PORT, ray://HOST:PORT or 'auto'; 'local' always starts one here. Default: the cluster at
    hand (RAY_ADDRESS or a running one), else a local one."""
    num_workers: Annotated[tuple[PositiveInt, PositiveInt] | PositiveInt | Literal["auto"], OneOrMore] = "auto"
    """Training workers, one a device. auto: one for each GPU; without GPUs two, or one on a single core. Two numbers,
    the least and the most: as many as the cluster holds, more or fewer whenever machines come or go."""
    allowed_workers: list[PositiveInt] | None = None
    """Numbers between the least and the most that are used. Default: each."""
    minimum_stay_s: NonNegativeFloat = 300.0
    """Seconds that more workers must have been possible, without a break, before they are used: each change is a start
    from a checkpoint."""
    cpus_per_worker: PositiveInt | Literal["auto"] = "auto"
    """CPU cores that each worker reserves and computes with. auto: an equal part of the cluster's, for the most workers
    that it holds at the start."""
    max_failures: NonNegativeInt = 3
    """Times in a row, without a new checkpoint between them, that workers lost to a fault of a machine are replaced."""
    dashboard_port: Annotated[int, Field(gt=0, le=65535)] | None = None
    """Port of Ray's dashboard on 127.0.0.1, for a local cluster. Default: 8265, or the next that is free."""

    @model_validator(mode="after")
    def _some_number_of_workers(self) -> "RaySection":
        if isinstance(self.num_workers, tuple) and not self.sizes:
            least, most = self.num_workers
            raise ValueError(f"num_workers: allowed_workers has no number from {least} to {most}")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of workers that take turns, ascending; none where the number is fixed."""
        if not isinstance(self.num_workers, tuple):
            return ()
        least, most = self.num_workers
        allowed = range(least, most + 1)
        return tuple(size for size in allowed if self.allowed_workers is None or size in self.allowed_workers)


class WandbSection(Section):
    """Weights & Biases. It can neither stop nor slow a run."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline: to a file, for 'wandb sync'; online: to the server (what it does not take can be uploaded from the run's
    folder later); disabled."""
    project: str = "esmeray"
    """W&B project that the run belongs to."""
    entity: str | None = None
    """User or team that the W&B project is of. Default: that of the API key."""
    group: str | None = None
    """W&B group that the run belongs to."""
    runs: Literal["one", "per_worker"] = "one"
    """one: a W&B run holds every worker's metrics; per_worker: each has its own, in one group."""
    init_timeout_s: PositiveFloat = 10.0
    """Seconds to wait for the server at the start."""
    finish_timeout_s: PositiveFloat = 10.0
    """Seconds to wait for uploads at the end."""


class AlertsSection(Section):
    """Warnings of a NaN, an idle GPU and nearly full memory; each comes again only after its cause was over."""

    enabled: bool = True
    """Warn at the terminal and in W&B."""
    utilization_percent: Percent = 50.0
    """GPU utilisation under which a warning comes, percent."""
    utilization_window_s: PositiveFloat = 120.0
    """Seconds that utilization must stay too low before it is an alert."""
    memory_percent: Percent = 95.0
    """Share of a device's or the host's memory in use, percent."""


class MonitoringSection(Section):
    """Samples of a run while it trains, taken every training.gpu_log_interval seconds."""

    prometheus: bool = True
    """Export the metrics through Ray's Prometheus port."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in the precision trained in, TFLOP/s, for the model FLOPs utilisation. Default: that of known
    GPUs; elsewhere the utilisation is left out."""
    alerts: AlertsSection = AlertsSection()


class Config(Section):
    """A training run of Esmeray."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    batch: Annotated[BatchSection, FIXED] = BatchSection()
    model: Annotated[ModelSection, FIXED] = ModelSection()
    training: TrainingSection = TrainingSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    checkpoint: Annotated[CheckpointSection, UNSEEN] = CheckpointSection()
    storage: Annotated[StorageSection, UNSEEN] = StorageSection()
    ray: Annotated[RaySection, UNSEEN] = RaySection()
    wandb: Annotated[WandbSection, UNSEEN] = WandbSection()
    monitoring: Annotated[MonitoringSection, UNSEEN] = MonitoringSection()

    @model_validator(mode="after")
    def _muon_has_matrices(self) -> "Config":
        if self.training.optimizer == "muon" and self.model.backbone.frozen:
            raise ValueError(
                "training.optimizer muon is for matrices of the backbone's layers, and model.backbone.frozen trains "
                "none: set it to adamw"
            )
        return self

    @model_validator(mode="after")
    def _longest_sequence_fits(self) -> "Config":
        needed = self.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
        if self.batch.tokens < needed:
            raise ValueError(
                f"batch.tokens ({self.batch.tokens}) can't hold one sequence of data.max_length "
                f"({self.data.max_length}) and its {SPECIAL_TOKENS_PER_SEQUENCE} special tokens: "
                f"raise batch.tokens to at least {needed} or lower data.max_length"
            )
        return self
