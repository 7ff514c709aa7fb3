"""The classifier's experiment: labelled records, one output per label, exact metrics, cached features.

Metrics of an evaluation are computed from the predictions of all workers together, not from means over workers.

Features of a frozen backbone are computed by all workers before the first step and cached for later runs. Each worker
computes a share of the missing features and writes it shard by shard. Shards of an interrupted run stay.

Shape legend: R records of the source, N sequences, T tokens of a batch, C labels, D channels.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.labelled import FeatureSource, LabelledSource, Labels
from esmeray.dataset.batches.loader import BatchSource
from esmeray.dataset.batches.plan import longest_first
from esmeray.dataset.batches.preparation import count_cropped, fixed_crop
from esmeray.dataset.embeddings.cache import FeatureStore, write_shard
from esmeray.dataset.labels.label_space import MAPPINGS_FILE, LabelSpace
from esmeray.dataset.labels.store import LabelledData, LabelledStore
from esmeray.dataset.labels.values import read_label_weights
from esmeray.dataset.packed_batch import WEIGHTS, PackedBatch
from esmeray.dataset.section import DataSection
from esmeray.dataset.targets import has_target
from esmeray.dataset.tokens.base import SequenceTokenizer, open_tokenizer
from esmeray.dataset.tokens.token_store import ensure_tokens
from esmeray.model.backbones.base import decayed_rates
from esmeray.model.backbones.fingerprint import features_fingerprint, weights_fingerprint
from esmeray.model.device import DTYPES
from esmeray.model.forward_loop import ForwardLoop, Indices, one_by_one
from esmeray.model.heads.losses import balanced_class_weights, probabilities
from esmeray.model.heads.settings import LOWER_IS_BETTER, best_metric
from esmeray.model.metrics.classification import classification_metrics
from esmeray.model.task_model import TaskModel, TaskOutput
from esmeray.run_folder.paths import TOKENIZER, RunFolder
from esmeray.tasks.classifier.export import export_classifier
from esmeray.tasks.classifier.model import Classifier, build_classifier
from esmeray.tasks.experiment import Engine, Experiment, RecordSet, TrainedState

SHARD_BYTES = 128 << 20
"""Bytes of features per shard. A shard is held in memory until it is written, and is lost with its worker."""


class LabelledExperiment(Experiment):
    """A task on labelled records: its sources of batches, and the metric that chooses the best checkpoint."""

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        data, seed = self.settings.data, self.settings.seed
        self._section = self.settings.model.classifier
        self._labelled = self.opened(path)
        # The run's copy, which the plan wrote: no node downloads or trains its own.
        self._tokenizer = open_tokenizer(run.tokenizer)
        # Part of each checkpoint, since the files in the run's folder may belong to later data.
        self.names = {MAPPINGS_FILE: (run.path / MAPPINGS_FILE).read_bytes()} | {
            f"{TOKENIZER}/{file.name}": file.read_bytes() for file in sorted(run.tokenizer.iterdir())
        }
        self.store, self.checksum = self._labelled.store, self._labelled.checksum
        # Tokenized once and stored next to the store: an epoch reads slices and tokenizes nothing.
        tokens = ensure_tokens(self.store, self._tokenizer, path.parent)
        space = self._labelled.label_space
        labels = Labels(self._labelled.targets, space.kind == "per_residue", self._labelled.weights)
        training = LabelledSource(tokens, labels, max_length=data.max_length, crop=data.crop, seed=seed)
        # Fixed windows: otherwise evaluations would differ by random crops.
        held_out = LabelledSource(tokens, labels, max_length=data.max_length, crop=fixed_crop(data.crop))
        self._held_out = held_out
        self._features = path.parent / "features"
        self.cropped = count_cropped(tokens.lengths[self._labelled.training], data.max_length)
        # Without held-out records, no checkpoint is known to be better than the last.
        self.patience, self.exports_best = self._section.patience, self._labelled.validation.size > 0
        self._set_batches_of(training, held_out, data.num_workers)

    @abstractmethod
    def opened(self, path: Path) -> LabelledData:
        """Open the prepared data."""

    def cost(self, metrics: dict[str, float]) -> float | None:
        """Return the value of ``classifier.best_metric``, negated if higher is better; None if it is undefined."""
        name = best_metric(self._section, self._labelled.label_space.kind)
        if name not in metrics:
            return None
        return metrics[name] if name in LOWER_IS_BETTER else -metrics[name]

    def _set_batches_of(self, training: BatchSource, held_out: BatchSource, num_workers: int = 0) -> None:
        self.set_batches(
            RecordSet(training, self._labelled.training),
            RecordSet(held_out, self._labelled.validation),
            num_workers=num_workers,
        )


class ClassifierExperiment(LabelledExperiment):
    """The classifier on a labelled store."""

    cache_hit_rate: float | None = None

    def opened(self, path: Path) -> LabelledData:
        stage_dir = self.settings.data.stage_dir
        return LabelledStore(path, stage_dir=None if stage_dir is None else Path(stage_dir))

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        checkpoint = trained.checkpoint.path
        tokenizer, space = open_tokenizer(checkpoint / TOKENIZER), LabelSpace.load(checkpoint)
        model = trained.put_into(build_classifier(trained.model, trained.seed, space, tokenizer))
        return export_classifier(
            model, folder, tokenizer, resolved_config=trained.resolved_config, facts=trained.facts, overwrite=overwrite
        )

    def open(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:
        """Compute the features of a frozen backbone, or find them in the cache, and use batches of features.

        Raises ConfigError if sequences are cropped at random, since their features can't be cached.
        """
        backbone, data = self.settings.model.backbone, self.settings.data
        if not (backbone.frozen and backbone.cache_features):
            return
        assert isinstance(model, Classifier)
        if data.crop == "random" and self.cropped.sequences:
            raise ConfigError(
                f"data.crop random: {self.cropped.sequences} sequences are longer than data.max_length, and "
                "features of random windows can't be cached: set data.crop to start or ends, or "
                "model.backbone.cache_features to false"
            )
        precision = self.settings.precision
        # Keys are content hashes, so that equal sequences share their features, in any store.
        keys_R2 = self.store.sequence_keys(np.arange(len(self.store)))
        # For counting FLOPs: from here on a step computes only the head.
        self.runs_backbone = False
        features, self.cache_hit_rate = ensure_features(
            model,
            self._held_out,
            np.concatenate([self._labelled.training, self._labelled.validation]),
            keys_R2,
            self._features / fingerprint(model, self._tokenizer, data, precision)[:24],
            precision=precision,
            max_tokens=self.settings.batch.tokens,
            context=context,
            control=control,
        )
        # One source for training and evaluation: windows are fixed, so epochs contain nothing random.
        source = FeatureSource(self._held_out, features, keys_R2, pooled=is_pooled(model))
        self._set_batches_of(source, source)

    def build_model(self) -> TaskModel:
        labelled, weights = self._labelled, self._section.label_weights
        return build_classifier(
            self.settings.model,
            self.settings.seed,
            labelled.label_space,
            self._tokenizer,
            _class_weights(labelled) if self._section.class_weights == "balanced" else None,
            _target_scale(labelled) if labelled.label_space.kind == "regression" else None,
            torch.from_numpy(read_label_weights(Path(weights), labelled.label_space)) if weights is not None else None,
        )

    def rate_shares(self, model: TaskModel) -> dict[Any, float]:
        """Return the layer-wise decay of the backbone's learning rate."""
        decay = self.settings.model.backbone.layer_decay
        if decay == 1.0:
            return {}
        assert isinstance(model, Classifier)
        return dict(decayed_rates(model.backbone, decay))

    def evaluate(self, engine: Engine, control: ControlGroup, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Return metrics of all held-out records, each counted once, from the predictions of all workers."""
        model, kind = engine.module, self._labelled.label_space.kind
        predicted: list[Tensor] = []
        wanted: list[Tensor] = []
        weights: list[Tensor] = []

        def predict(batch: PackedBatch) -> TaskOutput:
            logits, targets = model.logits(batch), batch.targets
            # Filler and unlabelled rows have no target and are not counted.
            judged = has_target(targets)
            # CPU-GPU sync point: predictions are moved off the device.
            predicted.append(probabilities(logits[judged], kind).float().cpu())
            wanted.append(targets[judged].cpu())
            if WEIGHTS in batch.by_sequence and kind != "per_residue":
                weights.append(batch.by_sequence[WEIGHTS][judged].cpu())
            return model.output_of(logits, batch)

        sums = self.held_out_sums(engine, control, stop_requested, predict)
        if not sums:
            return {}
        probabilities_NC = control.gather_rows(torch.cat(predicted))
        targets = control.gather_rows(torch.cat(wanted))
        weights_N = control.gather_rows(torch.cat(weights)) if weights else None
        metrics: dict[str, float] = {}
        # Worker 0 computes the metrics for all: early stopping and the best checkpoint must be decided alike on each.
        if control.rank == 0:
            metrics = model.metrics(sums) | classification_metrics(kind, probabilities_NC, targets, weights_N)
        return control.from_rank_0(metrics)


def _class_weights(labelled: LabelledData) -> Tensor:
    space, training = labelled.label_space, labelled.training
    if space.kind == "per_residue":
        assert isinstance(labelled, LabelledStore)  # only labelled stores have labels of residues
        blocks = iter([np.concatenate([labelled.residue_targets(index) for index in training.tolist()])])
    else:  # in blocks: targets of thousands of labels are sparse
        blocks = (labelled.targets[records] for records in np.array_split(training, training.size // 1024 + 1))
    return balanced_class_weights(space.kind, map(torch.from_numpy, blocks), space.num_outputs)


def _target_scale(labelled: LabelledData) -> tuple[Tensor, Tensor]:
    """Return means (C,) and standard deviations (C,) of the training targets; 0 and 1 for a column without numbers."""
    # Training records only: held-out records must not leak into the scale.
    targets_NC = labelled.targets[labelled.training].astype(np.float64)
    known_NC = np.isfinite(targets_NC)
    count_C = np.maximum(known_NC.sum(axis=0), 1)
    mean_C = np.where(known_NC, targets_NC, 0.0).sum(axis=0) / count_C
    deviation_C = np.sqrt(np.where(known_NC, (targets_NC - mean_C) ** 2, 0.0).sum(axis=0) / count_C)
    return torch.from_numpy(mean_C), torch.from_numpy(np.where(deviation_C > 0, deviation_C, 1.0))


def is_pooled(model: Classifier) -> bool:
    """Test whether the head needs only one vector per sequence, because its pooling has no weights."""
    return not model.per_residue and model.light_attention is None


def fingerprint(model: Classifier, tokenizer: SequenceTokenizer, data: DataSection, precision: str) -> str:
    """Return the identity of the features, hex: weights, architecture, tokens, cropping, precision and pooling."""
    pooling = model.section.pooling if is_pooled(model) else "tokens"
    weights = weights_fingerprint(model.backbone)
    return features_fingerprint(
        model.backbone, weights, tokenizer.fingerprint, data.max_length, data.crop, precision, pooling
    )


def ensure_features(
    model: Classifier,
    source: LabelledSource,
    records: NDArray[np.int64],
    keys_R2: NDArray[np.uint64],
    path: Path,
    *,
    precision: str,
    max_tokens: int,
    context: WorkerContext,
    control: ControlGroup,
) -> tuple[FeatureStore, float]:
    """Compute the missing features on all workers together, and open the store. Every worker calls it.

    ``records`` (N,): records of the source, whose crops must be fixed. ``keys_R2``: keys of all its sequences.
    ``path``: folder of this fingerprint. ``max_tokens``: token budget of a batch. Returns the features and the share of
    the records whose features were already there. Raises DataError if existing features are damaged, and ResourceError
    if the disk can't be written.
    """
    # Equal sequences are computed and stored once.
    distinct, first, uses = np.unique(keys_R2[records], axis=0, return_index=True, return_counts=True)
    missing = ~FeatureStore(path).has(distinct)
    hit_rate = 1 - float(uses[missing].sum() / max(1, records.size))
    control.all_true(True)  # writing waits until all have looked
    if missing.any():
        wanted = records[first][missing]
        # Longest first, and neighbours go to different workers, so that all have about the same work.
        wanted = wanted[np.argsort(-source.token_lengths(wanted), kind="stable")][context.rank :: context.world_size]
        # A copy: the model stays in fp32 on the CPU until the engine takes it.
        backbone = copy.deepcopy(model.backbone).to(context.device, DTYPES[precision]).eval()
        lengths_N = source.token_lengths(wanted)
        rows_N = np.ones_like(lengths_N) if is_pooled(model) else lengths_N
        # Four bytes per channel: features are stored in fp32, whatever the compute precision.
        for indices in longest_first(rows_N, max(1, SHARD_BYTES // (4 * model.backbone.hidden_size))):
            shard = wanted[indices]
            # Named after its keys, so that workers and concurrent runs never write different content under one name.
            name = f"{xxhash.xxh3_64_hexdigest(keys_R2[shard].tobytes())}-{context.rank:05d}"
            rows = dict(_computed(model, backbone, source, shard, rows_N[indices], max_tokens, context.device))
            write_shard(path, name, keys_R2[shard], [rows[index] for index in range(shard.size)])
    control.all_true(True)
    return FeatureStore(path), hit_rate


def _computed(
    model: Classifier,
    backbone: torch.nn.Module,
    source: LabelledSource,
    records: NDArray[np.int64],
    rows_N: NDArray[np.int64],
    max_tokens: int,
    device: torch.device,
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield each record's index in ``records`` and its features, (1, D) or (tokens, D), as ``rows_N`` states."""
    lengths_N = source.token_lengths(records)

    @torch.inference_mode()
    def launch(indices: Indices) -> dict[str, Tensor]:
        # Crops are fixed, so every epoch is the same; use epoch 0.
        (made,) = source.batches([(0, records[indices])])
        batch = made.batch.to(device, non_blocking=True)
        features_TD = backbone(batch)
        return {"features": (model.pool(features_TD, batch) if is_pooled(model) else features_TD).float()}

    loop = ForwardLoop(
        device, one_by_one(launch), lambda index: f"record {records[index]}, {lengths_N[index]:,} tokens"
    )
    for indices, tensors in loop.run(longest_first(lengths_N, max_tokens)):
        rows = tensors["features"].split(rows_N[indices].tolist())
        yield from zip(indices.tolist(), (row.numpy() for row in rows), strict=True)
