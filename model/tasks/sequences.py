"""Strings of residues to packed batches, for those who call a model by hand and not through the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.errors import DataError
from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import RESIDUE_TABLE, UNK, packed_from_tokens, sequence_lengths, tokenize_residue_texts
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE

_RESIDUES = frozenset(chr(code) for code in range(RESIDUE_TABLE.size) if RESIDUE_TABLE[code] != UNK)


def pack_in_order(sequences: Iterable[str], max_tokens: int) -> Iterator[PackedBatch]:
    """Batches of consecutive sequences within ``max_tokens``; a longer sequence gets a batch of its own.

    Raises DataError (a character that is no residue of the ESM alphabet, which would make rows and residues disagree).
    """
    waiting: list[str] = []
    tokens = first = 0
    for index, sequence in enumerate(sequences):
        added = len(sequence) + SPECIAL_TOKENS_PER_SEQUENCE
        if waiting and tokens + added > max_tokens:
            yield _pack(waiting, first)
            waiting, tokens, first = [], 0, index
        waiting.append(sequence)
        tokens += added
    if waiting:
        yield _pack(waiting, first)


def _pack(sequences: list[str], first: int) -> PackedBatch:
    tokens_T = tokenize_residue_texts(sequences)
    if tokens_T is None:
        raise DataError(_refusal(sequences, first))
    return packed_from_tokens(tokens_T, sequence_lengths(sequences) + SPECIAL_TOKENS_PER_SEQUENCE)


def _refusal(sequences: list[str], first: int) -> str:
    """Where among the sequences, of which the first has this index, the first character stands that is no residue."""
    index, place, character = next(
        (index, place, character)
        for index, sequence in enumerate(sequences, first)
        for place, character in enumerate(sequence, 1)
        if character not in _RESIDUES
    )
    return (
        f"sequence {index} (counted from 0) has {character!r} at position {place}, which is no residue of "
        "the ESM alphabet; use upper-case letters, and X for an unknown residue"
    )
