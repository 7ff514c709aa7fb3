"""How much there is to train on: exactly from a store, or estimated from the head of the files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dataset.batches.cropping import count_cropped, cropped_lengths
from dataset.batches.splitting import split_records
from dataset.fasta.counts import IngestCounts
from dataset.fasta.reader import FastaSource
from dataset.store.conversion import SAMPLE
from dataset.store.format import MANIFEST_FILE
from dataset.store.reader import Store
from dataset.store.sample import sample_records
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, DataSection

HEAD_RECORDS = 50_000
"""Records that an estimate reads."""


@dataclass(frozen=True)
class DataSize:
    """Training sequences and their tokens after cropping, special tokens included; ``exact`` or estimated.

    ``held_out`` are the sequences of the validation; ``counts`` tell what reading
    changed or left out, where that is known.
    ``cropped_sequences`` are longer than ``data.max_length``; ``cropped_residues`` of them are left out each epoch.
    """

    sequences: int
    tokens: int
    cropped_sequences: int
    cropped_residues: int
    exact: bool
    held_out: int = 0
    counts: IngestCounts | None = None


def size_of_store(store: Store, data: DataSection) -> DataSize:
    """Count the training part of a store."""
    training, held_out = split_records(store.sequence_hashes, data.validation_share)
    return replace(_of_lengths(store.lengths[training], data), held_out=held_out.size, counts=store.manifest.counts)


def estimate_size(data: DataSection) -> DataSize:
    """What training on the source will come to, reading no more than the head of the files.

    Raises:
        DataError: a file is missing or damaged in what was read.
    """
    if len(data.source) == 1 and (Path(data.source[0]) / MANIFEST_FILE).is_file():
        return size_of_store(Store(data.source[0]), data)
    lengths, share_read = _head_lengths(data)
    head = _of_lengths(np.array(lengths), data)
    scale = (1 - data.validation_share) / share_read
    return DataSize(
        sequences=round(head.sequences * scale),
        tokens=round(head.tokens * scale),
        cropped_sequences=round(head.cropped_sequences * scale),
        cropped_residues=round(head.cropped_residues * scale),
        exact=False,
        held_out=round(head.sequences * data.validation_share / share_read),
    )


def _head_lengths(data: DataSection) -> tuple[list[int], float]:
    if data.source == [SAMPLE]:
        sample = data.sample
        return [len(sequence) for _, sequence in sample_records(sample.records, sample.families, sample.seed)], 1.0
    source = FastaSource(data.source)
    lengths: list[int] = []
    for batch in source.batches():
        lengths += map(len, batch.sequences)
        if len(lengths) >= HEAD_RECORDS:
            return lengths, max(source.bytes_read / source.bytes_total, 1e-9)
    return lengths, 1.0


def _of_lengths(lengths_N: np.ndarray, data: DataSection) -> DataSize:
    tokens = cropped_lengths(lengths_N, data.max_length) + SPECIAL_TOKENS_PER_SEQUENCE
    cropped = count_cropped(lengths_N, data.max_length)
    return DataSize(lengths_N.size, int(tokens.sum()), cropped.sequences, cropped.residues, exact=True)
