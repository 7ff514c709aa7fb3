"""The plan of an embedding job: which sequences are computed, in which shard and batch, from lengths and hashes alone;
and the outputs and files that its settings mean for a model. Nothing here needs torch, so that mistakes are reported at
once.

In: a store, its records that an output is to get, and the job's limits. Out: distinct sequences, numbered in the order
of the input, cut into shards; those of a shard are packed into batches under a token budget, the longest first, so that
memory runs out early or not at all.
The same store and limits give the same plan, and the same plan gives the same bytes on the same kind of device.

Shape legend: N records of the output, U distinct sequences, S shards, n sequences of a shard, B batches of a shard.
"""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted, did_you_mean
from esmeray.dataset.batches.plan import Indices, longest_first
from esmeray.dataset.embeddings.formats.base import Format
from esmeray.dataset.embeddings.formats.hdf5 import check_ids
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.section import EmbedSection
from esmeray.inference.models.kinds import ModelFacts, Output, output_names


class Shard(NamedTuple):
    """A shard as it is sent to whoever computes it.

    Attributes:
        number: from 0.
        records: (n,) of the store.
        lengths: (n,) residues that are taken of each; more than ``window`` are averaged over windows.
        budget: tokens of a batch.
        window: residues of a window; None where nothing is longer.
    """

    number: int
    records: Indices
    lengths: Indices
    budget: int
    window: int | None

    def batches(self) -> list[Indices]:
        """Indices (0 to n) of the sequences of each batch, the longest first; one that takes windows is alone."""
        # Two special tokens for any model: the plan, and with it the bytes, are the same whatever model computes it.
        tokens_n = self.lengths + SPECIAL_TOKENS_PER_SEQUENCE
        if self.window is not None:
            # More than the budget, so that nothing shares its batch: windows are batched by the model itself.
            tokens_n = np.where(self.lengths > self.window, self.budget + tokens_n, tokens_n)
        return longest_first(tokens_n, self.budget)


@dataclass(frozen=True)
class Plan:
    """Distinct sequences of records of a store in shards.

    Attributes:
        chosen: (N,) the records of the store.
        sequences: (N,) number of each record's sequence.
        records: (U,) the first record of the store that has each sequence.
        lengths: (U,) residues that are taken of each.
        bounds: (S+1,) number of the first sequence of each shard.
        num_cached: shards at the start whose values are known already.
        long_sequences: distinct sequences of more than the limit.
        residues_left_out: of all records, by cropping.
        budget, window: as in :class:`Shard`.
    """

    chosen: Indices
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
        # All that decides which sequences share a shard and a batch: rounding depends on it, and so do the bytes.
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
) -> Plan:
    """The plan of a job.

    ``longest``: residues that the model takes at most. ``known``: (U,) where the values of each sequence, in the order
    of the input, are known from, -1 where nowhere: known ones come first, in this order, in shards of their own.
    ``chosen``: records of the store, ascending; default: all. Raises ConfigError for a max_length beyond
    the model's, DataError if a sequence is longer than the limit and the settings say error, and for ids that HDF5
    can't hold.
    """
    chosen = np.arange(len(store)) if chosen is None else chosen
    # Now, though they are needed at the end: hours of computation would be lost to an id with a slash.
    if FORMATS[settings.format].has_keys and settings.hdf5_key == "id":
        check_ids(map(store.id, chosen.tolist()))
    limit = longest if settings.max_length is None else settings.max_length
    if limit is not None and longest is not None and limit > longest:
        raise ConfigError(
            f"--embed.max_length {limit}: the model takes at most {longest:,} residues; set it to {longest} or less"
        )
    whole = store.lengths
    records, sequences = distinct_sequences(store, chosen)
    long = np.zeros(records.size, dtype=bool) if limit is None else whole[records] > limit
    if long.any() and settings.long == "error":
        first = int(records[long][0])
        raise DataError(
            f"{store.id(first)}: {whole[first]:,} residues, more than {limit:,} "
            f"({counted(int(long.sum()), 'such sequence{s}')}); choose embed.long crop or window, or max_length"
        )
    lengths = whole[records].astype(np.int64)  # the store's are narrower, and are summed below
    cropped = 0
    if settings.long == "crop" and limit is not None:
        # Of all records, duplicates too: it is what their owner misses.
        cropped = int(np.maximum(whole[chosen].astype(np.int64) - limit, 0).sum())
        lengths = np.minimum(lengths, limit)
    known = np.full(records.size, -1) if known is None else known
    num_known = int((known >= 0).sum())
    # Known ones first, in shards that nobody computes, each read from one end of its source to the other; stable, so
    # that the others keep the order of the input.
    order = np.argsort(np.where(known < 0, np.iinfo(np.int64).max, known), kind="stable")
    numbers = np.empty_like(order)
    numbers[order] = np.arange(order.size)
    lengths = lengths[order]
    tokens = lengths + SPECIAL_TOKENS_PER_SEQUENCE
    known_bounds = _bounds(tokens[:num_known], settings.shard_tokens)
    return Plan(
        chosen=chosen,
        sequences=numbers[sequences],
        records=records[order],
        lengths=lengths,
        bounds=np.concatenate([known_bounds, num_known + _bounds(tokens[num_known:], settings.shard_tokens)[1:]]),
        num_cached=known_bounds.size - 1,
        long_sequences=int(long.sum()),
        residues_left_out=cropped,
        # Those of a job are resolved by now; else a small batch is right on every device.
        budget=settings.resolved(on_cuda=False).tokens,
        window=limit if settings.long == "window" else None,
    )


def distinct_sequences(store: Store, chosen: Indices) -> tuple[Indices, Indices]:
    """(U,) the first record that has each distinct sequence, in input order, and (N,) the number of each record's.

    Sequences are compared by both hashes of their keys, since pairs of one XXH3-64 can be constructed.
    """
    # By sorting: a dictionary would hold an object for each of 10^8 records.
    _, first, group = np.unique(store.sequence_keys(chosen).view("S16")[:, 0], return_index=True, return_inverse=True)
    # Back to the order of the input: a shard then reads records that lie together in the store.
    by_input = np.argsort(first)
    rank = np.empty_like(by_input)
    rank[by_input] = np.arange(by_input.size)
    return chosen[first[by_input]], rank[group]


def _bounds(tokens: Indices, most: int) -> Indices:
    """Bounds of consecutive shards, each from its first sequence up to the one with which it reaches ``most``."""
    # By the tokens before it: a sequence longer than a shard still makes a shard, and none is ever empty.
    shards = (np.cumsum(tokens) - tokens) // most
    return np.concatenate([[0], shards.searchsorted(np.unique(shards), side="right")]).astype(np.int64)


@dataclass(frozen=True)
class JobFacts(ModelFacts):
    """A model as a job uses it: its outputs, and fingerprints of the features of those that can be cached."""

    outputs: tuple[Output, ...] = ()
    cache_keys: dict[str, str] = field(default_factory=dict)


def format_of(settings: EmbedSection, output: Output) -> Format:
    """Format of an output's files: what is no vector of a protein stays in shards, where the format can't hold it."""
    chosen = FORMATS[settings.format]
    return chosen if output.per in chosen.holds else FORMATS["safetensors"]


def check_registered(settings: EmbedSection) -> None:
    """Raise ConfigError for an output or a format that there is not."""
    formats = [name for name, kind in FORMATS.items() if "protein" in kind.holds]
    names = [("outputs", "output", name, output_names()) for name in settings.outputs]
    for key, kind, name, known in [*names, ("format", "format", settings.format, formats)]:
        if name not in known:
            raise ConfigError(
                f"--embed.{key} {name}: there is no such {kind}{did_you_mean(name, known)}; "
                f"choose of {', '.join(known)}"
            )
    FORMATS[settings.format].check()


def check_settings(settings: EmbedSection, outputs: tuple[Output, ...]) -> None:
    """Raise ConfigError for settings that don't go together."""
    for output in outputs:
        file_format = format_of(settings, output)
        if settings.dtype not in file_format.dtypes:
            raise ConfigError(
                f"--embed.dtype {settings.dtype}: {file_format.name}, the format of {output.name}, holds "
                f"{', '.join(file_format.dtypes)}; choose one of these, or another --embed.format or --embed.outputs"
            )
    if settings.long == "window" and settings.max_length is not None and settings.overlap >= settings.max_length:
        raise ConfigError(f"--embed.overlap {settings.overlap}: must be less than max_length, {settings.max_length}")
