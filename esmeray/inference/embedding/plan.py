"""Plan of an embedding job: the shard and batch of each sequence, and the outputs and file formats of its settings.

The plan needs only lengths and hashes. This module does not import torch, so that mistakes are reported at once.

Input is a store, the chosen records, and the job's limits. Output is the distinct sequences, numbered in input order
and split into shards. Sequences of a shard are packed into batches under a token budget. The longest come first, so
that an out-of-memory error occurs early. The same store and limits give the same plan, and the same plan gives the same
bytes on the same kind of device.

Shape legend: N records of the output, U distinct sequences, S shards, n sequences of a shard, B batches of a shard.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from esmeray.common.errors import ConfigError, DataError, did_you_mean
from esmeray.common.text import counted
from esmeray.dataset.batches.plan import Indices, longest_first
from esmeray.dataset.embeddings.formats.base import Format
from esmeray.dataset.embeddings.formats.hdf5 import check_ids
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.section import EmbedSection
from esmeray.inference.models.kinds import ModelFacts, Output, output_names, passes


class Shard(NamedTuple):
    """A shard, as it is sent to the worker that computes it.

    Attributes:
        number: shard number from 0.
        records: (n,) records of the store.
        lengths: (n,) residues used per sequence; sequences longer than ``window`` are averaged over windows.
        budget: token budget of a batch.
        window: residues of a window; None if no sequence needs windows.
    """

    number: int
    records: Indices
    lengths: Indices
    budget: int
    window: int | None

    def batches(self) -> list[Indices]:
        """Indices (0 to n) of the sequences of each batch, longest first. A sequence with windows has its own batch."""
        # Two special tokens for any model, so that the plan, and therefore the bytes, don't depend on the model.
        tokens_n = self.lengths + SPECIAL_TOKENS_PER_SEQUENCE
        if self.window is not None:
            # Raised above the budget, so that nothing shares the batch: the model batches its windows itself.
            tokens_n = np.where(self.lengths > self.window, self.budget + tokens_n, tokens_n)
        return longest_first(tokens_n, self.budget)


@dataclass(frozen=True)
class Plan:
    """Shards of the distinct sequences of chosen records.

    Attributes:
        sequences: (N,) sequence number of each record.
        records: (U,) first record of the store with each sequence.
        lengths: (U,) residues used per sequence.
        bounds: (S+1,) number of the first sequence of each shard.
        num_cached: number of shards at the start whose values are known.
        long_sequences: number of distinct sequences longer than the limit.
        residues_left_out: residues removed by cropping, over all records.
        budget, window: as in :class:`Shard`.
    """

    sequences: Indices
    records: Indices
    lengths: Indices
    bounds: Indices
    num_cached: int
    long_sequences: int
    residues_left_out: int
    budget: int
    window: int | None

    @property
    def num_shards(self) -> int:
        """S."""
        return self.bounds.size - 1

    @property
    def num_sequences(self) -> int:
        """U."""
        return self.records.size

    @property
    def checksum(self) -> str:
        """Identity of the plan, hex."""
        # Hashes everything that assigns sequences to shards and batches, because rounding depends on the batch.
        digest = hashlib.sha256(repr((self.num_cached, self.budget, self.window)).encode())
        for array in (self.sequences, self.records, self.lengths, self.bounds):
            digest.update(array.tobytes())
        return digest.hexdigest()[:32]

    def shard(self, number: int) -> Shard:
        rows = slice(self.bounds[number], self.bounds[number + 1])
        return Shard(number, self.records[rows], self.lengths[rows], self.budget, self.window)


def make_plan(
    store: Store,
    settings: EmbedSection,
    longest: int | None,
    known: Indices | None = None,
    chosen: Indices | None = None,
    outputs: Sequence[Output] = (),
) -> Plan:
    """Make the plan of a job.

    Args:
        longest: maximum residues of the model.
        known: (U,) encoded source of each sequence's values, in input order; -1 if unknown. Known sequences come first,
            in this order, in separate shards.
        chosen: records of the store, ascending; default: all.
        outputs: outputs of the model, whose passes count in the tokens of a shard.

    Raises ConfigError if max_length exceeds the model's maximum. Raises DataError for ids that HDF5 can't hold, and for
    a sequence longer than the limit if the settings say error.
    """
    chosen = np.arange(len(store)) if chosen is None else chosen
    # Checked now, although ids are written last: an id with a slash would otherwise fail after hours of computation.
    if FORMATS[settings.format].has_keys and settings.hdf5_key == "id":
        check_ids(map(store.id, chosen.tolist()))
    limit = longest if settings.max_length is None else settings.max_length
    if limit is not None and longest is not None and limit > longest:
        raise ConfigError(
            f"--embed.max_length {limit}: the model supports at most {longest:,} residues; set it to at most {longest}"
        )
    whole = store.lengths
    records, sequences = distinct_sequences(store, chosen)
    long = np.zeros(records.size, dtype=bool) if limit is None else whole[records] > limit
    if long.any() and settings.long == "error":
        first = int(records[long][0])
        raise DataError(
            f"{store.id(first)}: {whole[first]:,} residues, more than the limit of {limit:,} "
            f"({counted(int(long.sum()), 'sequence{s}')} too long); set embed.long to crop or window, or change "
            "max_length"
        )
    lengths = whole[records].astype(np.int64)  # the store's integers are smaller and could overflow in sums
    cropped = 0
    if settings.long == "crop" and limit is not None:
        # Over all records, including duplicates, because it reports what each record loses.
        cropped = int(np.maximum(whole[chosen].astype(np.int64) - limit, 0).sum())
        lengths = np.minimum(lengths, limit)
    known = np.full(records.size, -1) if known is None else known
    num_known = int((known >= 0).sum())
    # Known sequences come first in separate shards, ordered by position in their source to read it sequentially. The
    # sort is stable, so that others keep the input order.
    order = np.argsort(np.where(known < 0, np.iinfo(np.int64).max, known), kind="stable")
    numbers = np.empty_like(order)
    numbers[order] = np.arange(order.size)
    lengths = lengths[order]
    tokens = passes(outputs, lengths) * (lengths + SPECIAL_TOKENS_PER_SEQUENCE)
    known_bounds = _bounds(tokens[:num_known], settings.shard_tokens)
    return Plan(
        sequences=numbers[sequences],
        records=records[order],
        lengths=lengths,
        bounds=np.concatenate([known_bounds, num_known + _bounds(tokens[num_known:], settings.shard_tokens)[1:]]),
        num_cached=known_bounds.size - 1,
        long_sequences=int(long.sum()),
        residues_left_out=cropped,
        # A job's settings are resolved by now; otherwise the small CPU batch suits every device.
        budget=settings.resolved(on_cuda=False).tokens,
        window=limit if settings.long == "window" else None,
    )


def distinct_sequences(store: Store, chosen: Indices) -> tuple[Indices, Indices]:
    """Return (U,) first records of distinct sequences, in input order, and (N,) the sequence number per record.

    Sequences are compared by both hashes of their keys, because collisions of a single XXH3-64 can be constructed.
    """
    # Sorted, because a dictionary would hold an object for each of 10^8 records.
    _, first, group = np.unique(store.sequence_keys(chosen).view("S16")[:, 0], return_index=True, return_inverse=True)
    # Restore input order, so that a shard reads neighbouring records of the store.
    by_input = np.argsort(first)
    rank = np.empty_like(by_input)
    rank[by_input] = np.arange(by_input.size)
    return chosen[first[by_input]], rank[group]


def _bounds(tokens: Indices, most: int) -> Indices:
    """Bounds of consecutive shards. Each shard ends with the sequence that reaches ``most`` tokens."""
    # Based on the tokens before each sequence: a sequence longer than a shard still forms one, and no shard is empty.
    shards = (np.cumsum(tokens) - tokens) // most
    return np.concatenate([[0], shards.searchsorted(np.unique(shards), side="right")]).astype(np.int64)


@dataclass(frozen=True)
class JobFacts(ModelFacts):
    """Properties of a model in a job: its outputs, and the cache keys of those that can be cached."""

    outputs: tuple[Output, ...] = ()
    cache_keys: dict[str, str] = field(default_factory=dict)


def format_of(settings: EmbedSection, output: Output) -> Format:
    """Format of an output's files. Outputs that the chosen format can't hold stay in safetensors shards."""
    chosen = FORMATS[settings.format]
    return chosen if output.per in chosen.holds else FORMATS["safetensors"]


def check_registered(settings: EmbedSection) -> None:
    """Raise ConfigError for an unknown output or format."""
    formats = [name for name, kind in FORMATS.items() if "protein" in kind.holds]
    names = [("outputs", "output", name, output_names()) for name in settings.outputs]
    for key, kind, name, known in [*names, ("format", "format", settings.format, formats)]:
        if name not in known:
            raise ConfigError(
                f"--embed.{key} {name}: unknown {kind}{did_you_mean(name, known)}; available: {', '.join(known)}"
            )
    FORMATS[settings.format].check()


def check_settings(settings: EmbedSection, outputs: tuple[Output, ...]) -> None:
    """Raise ConfigError for incompatible settings."""
    for output in outputs:
        file_format = format_of(settings, output)
        if settings.dtype not in file_format.dtypes:
            raise ConfigError(
                f"--embed.dtype {settings.dtype}: {file_format.name}, the format of {output.name}, supports "
                f"only {', '.join(file_format.dtypes)}; use one of these, or another --embed.format or "
                "--embed.outputs"
            )
    if settings.long == "window" and settings.max_length is not None and settings.overlap >= settings.max_length:
        raise ConfigError(f"--embed.overlap {settings.overlap}: must be less than max_length, {settings.max_length}")
