"""Features of a frozen backbone, computed by all workers before the first step and cached for later runs.

Each worker computes a share of the missing features and writes it shard by shard. Shards of an interrupted run stay.
Shape legend: R records of the source, N sequences, T tokens of a batch, D channels.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.dataset.batches.loader import LabelledSource
from esmeray.dataset.batches.plan import longest_first
from esmeray.dataset.embeddings.cache import FeatureStore, write_shard
from esmeray.dataset.section import DataSection
from esmeray.dataset.tokens.base import SequenceTokenizer
from esmeray.model.backbones.fingerprint import features_fingerprint, weights_fingerprint
from esmeray.model.device import DTYPES
from esmeray.model.forward_loop import ForwardLoop, Indices, one_by_one
from esmeray.tasks.classifier.model import Classifier

SHARD_BYTES = 128 << 20
"""Bytes of features per shard. A shard is held in memory until it is written, and is lost with its worker."""


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
