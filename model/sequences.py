"""Strings of residues to packed batches, for those who call a model by hand and not through the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dataset.packed_batch import PackedBatch
from dataset.tokenizer import RESIDUE_TABLE, UNK, pack_sequences
from train_config.errors import DataError
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE

_RESIDUES = frozenset(chr(code) for code in range(RESIDUE_TABLE.size) if RESIDUE_TABLE[code] != UNK)


def pack_in_order(sequences: Iterable[str], max_tokens: int) -> Iterator[PackedBatch]:
    """Batches of consecutive sequences within ``max_tokens``; a longer sequence gets a batch of its own.

    Raises:
        DataError: a character that is no residue of the ESM alphabet, which would make rows and residues disagree.
    """
    waiting: list[str] = []
    tokens = 0
    for index, sequence in enumerate(sequences):
        _check_residues(sequence, index)
        added = len(sequence) + SPECIAL_TOKENS_PER_SEQUENCE
        if waiting and tokens + added > max_tokens:
            yield pack_sequences(waiting)
            waiting, tokens = [], 0
        waiting.append(sequence)
        tokens += added
    if waiting:
        yield pack_sequences(waiting)


def _check_residues(sequence: str, index: int) -> None:
    bad = next((place for place, residue in enumerate(sequence) if residue not in _RESIDUES), None)
    if bad is not None:
        raise DataError(
            f"sequence {index} (counted from 0) has {sequence[bad]!r} at position {bad + 1}, which is no residue of "
            "the ESM alphabet; use upper-case letters, and X for an unknown residue"
        )
