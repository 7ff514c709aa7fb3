"""Strings of residues to packed batches, for those who call a model by hand and not through the loader."""

from collections.abc import Iterable, Iterator

from common.errors import DataError
from dataset.packed_batch import PackedBatch
from dataset.tokens.esm import packed_from_tokens, sequence_lengths, tokenize_residue_texts
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE


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
        wrong = next(index for index, text in enumerate(sequences) if tokenize_residue_texts([text]) is None)
        place = next(place for place, letter in enumerate(sequences[wrong]) if tokenize_residue_texts([letter]) is None)
        raise DataError(
            f"sequence {first + wrong} (counted from 0) has {sequences[wrong][place]!r} at position {place + 1}, which "
            "is no residue of the ESM alphabet; use upper-case letters, and X for an unknown residue"
        )
    return packed_from_tokens(tokens_T, sequence_lengths(sequences) + SPECIAL_TOKENS_PER_SEQUENCE)
