"""The ESM alphabet by table: residues in, token ids out.

A sequence of plain residues is one look-up in a 256-entry table; what can't be one (text with special tokens, blanks,
unknown characters) takes a slower path with the rules of transformers' ``EsmTokenizer``, whose ids both paths give on
any text. Only :func:`pack_sequences` needs torch, so that loader processes start fast.

Shape legend: T tokens, N sequences, R residues.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.multiples import multiples
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE

if TYPE_CHECKING:
    from dataset.packed_batch import PackedBatch

VOCABULARY: tuple[str, ...] = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWC",
    *"XBUZO.-",
    *("<null_1>", "<mask>"),
)
"""The 33 tokens in the order of fair-esm's ``Alphabet("ESM-1b")`` and ESM-2's ``vocab.txt``; the index is the id."""

CLS, PAD, EOS, UNK = 0, 1, 2, 3
MASK = 32

STANDARD_RESIDUES: NDArray[np.uint8] = np.arange(4, 24, dtype=np.uint8)
"""Ids of the 20 amino acids of the standard genetic code."""

FIRST_RESIDUE, LAST_RESIDUE = 4, 30
"""Ids from the first to the last are residues: the standard 20, then X, B, U, Z, O and the gaps '.' and '-'."""

_IDS = {token: index for index, token in enumerate(VOCABULARY)}
_KNOWN_TOKEN = re.compile("(" + "|".join(map(re.escape, VOCABULARY)) + ")")


def _residue_table() -> NDArray[np.uint8]:
    table = np.full(256, UNK, dtype=np.uint8)
    for index in range(FIRST_RESIDUE, LAST_RESIDUE + 1):
        table[ord(VOCABULARY[index])] = index
    table.setflags(write=False)
    return table


RESIDUE_TABLE = _residue_table()
"""(256,) uint8: the id of each ASCII residue; <unk> for any other byte."""

_BETWEEN = b"\xff\xfe"
"""Joins sequences; :data:`_JOINED_TABLE` makes <eos><cls> of it. Outside ASCII, so that no residue is meant by it."""

_BETWEEN_TEXT = _BETWEEN.decode("latin-1")


def _joined_table() -> bytes:
    table = RESIDUE_TABLE.copy()
    table[list(_BETWEEN)] = EOS, CLS
    return table.tobytes()


_JOINED_TABLE = _joined_table()


def tokenize_residues(residues_R: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Ids of ASCII residues, one each, without special tokens.

    Args:
        residues_R: (R,) uint8, ASCII.

    Returns:
        (R,) uint8; bytes outside the alphabet are <unk>.
    """
    return RESIDUE_TABLE[residues_R]


def encode(sequence: str) -> NDArray[np.int64]:
    """Ids of one sequence between <cls> and <eos>, as ``EsmTokenizer(sequence)["input_ids"]`` gives them.

    Between known tokens, each run of other characters without blanks is one <unk>; blanks separate and vanish.

    Returns:
        (T,) int64.
    """
    ids = _encode_plain(sequence)
    if ids is None:
        ids = np.array(_encode_text(sequence), dtype=np.int64)
    return np.concatenate(([CLS], ids, [EOS])).astype(np.int64, copy=False)


def _encode_plain(sequence: str) -> NDArray[np.uint8] | None:
    """Ids when every character is a residue, else None."""
    if not sequence.isascii():
        return None
    ids = tokenize_residues(np.frombuffer(sequence.encode("ascii"), dtype=np.uint8))
    return None if (ids == UNK).any() else ids


def _encode_text(text: str) -> list[int]:
    """Ids of any text, without <cls> and <eos> around them."""
    ids: list[int] = []
    # With a group in the pattern, re.split gives what is between the tokens at even and the tokens at odd places.
    for place, piece in enumerate(_KNOWN_TOKEN.split(text)):
        if place % 2:
            ids.append(_IDS[piece])
        else:
            ids.extend([UNK] * len(piece.split()))
    return ids


def tokenize_pieces(sequences: Sequence[bytes | memoryview]) -> NDArray[np.uint8]:
    """Ids of ASCII sequences, each between its own <cls> and <eos>: joined by two bytes that stand for <eos><cls>.

    Every byte is looked up once, and no work is done in Python for each sequence.

    Args:
        sequences: N of them. The two bytes, which are outside ASCII, are not looked for in them.

    Returns:
        (T,) uint8.
    """
    return _tokenize_joined(_BETWEEN.join([b"", *sequences, b""]))


def _tokenize_joined(joined: bytes) -> NDArray[np.uint8]:
    # CPython 3.11 translates bytes a third slower than a bytearray: it looks whether anything has changed.
    return np.frombuffer(bytearray(joined).translate(_JOINED_TABLE), dtype=np.uint8)[1:-1]


def tokenize_residue_texts(sequences: Sequence[str]) -> NDArray[np.uint8] | None:
    """Ids of sequences given as text, each between its own <cls> and <eos>, if every character is a residue.

    Returns:
        (T,) uint8, or None where some character is none.
    """
    try:
        joined = _BETWEEN_TEXT.join(["", *sequences, ""]).encode("latin-1")
    except UnicodeEncodeError:
        return None
    tokens_T = _tokenize_joined(joined)
    # Every id below the residues' is then one that joining has put there; anything else in the text adds to them.
    if np.count_nonzero(tokens_T < FIRST_RESIDUE) != SPECIAL_TOKENS_PER_SEQUENCE * len(sequences):
        return None
    return tokens_T


def pack_sequences(sequences: Sequence[str]) -> PackedBatch:
    """Pack sequences given as text, in their order and whole, without a store: what inference starts from.

    Args:
        sequences: N of them, tokenized as :func:`encode` does.

    Returns:
        A batch whose ``records`` count from 0 and whose ``targets`` are None.

    Raises:
        DataError: there is no sequence.
    """
    if not sequences:
        raise DataError("no sequences to pack: give at least one")
    tokens_T = tokenize_residue_texts(sequences)
    if tokens_T is not None:
        return packed_from_tokens(tokens_T, sequence_lengths(sequences) + SPECIAL_TOKENS_PER_SEQUENCE)
    tokens = [encode(sequence) for sequence in sequences]
    return packed_from_tokens(np.concatenate(tokens), sequence_lengths(tokens))


def sequence_lengths(sequences: Sequence[Sized]) -> NDArray[np.int64]:
    """(N,) int64: the length of each."""
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))


def packed_from_tokens(tokens_T: NDArray[np.integer], lengths_N: NDArray[np.int64]) -> PackedBatch:
    """The batch of these tokens, without targets, whose ``records`` count from 0.

    Args:
        tokens_T: (T,) ids, special tokens included.
        lengths_N: (N,) tokens of each sequence.
    """
    import torch  # here, so that loader processes, which need the tables alone, start without it

    from dataset.packed_batch import PackedBatch

    cu_seqlens = cumulative_lengths(lengths_N)
    return PackedBatch(
        tokens=torch.from_numpy(tokens_T.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(lengths_N.max()),
        positions=torch.from_numpy(token_positions(cu_seqlens)),
        records=torch.arange(lengths_N.size),
    )


def cumulative_lengths(lengths_N: NDArray[np.integer]) -> NDArray[np.int32]:
    """(N+1,) int32: where each sequence starts when they lie end to end, and where the last ends."""
    cu_seqlens = np.zeros(lengths_N.size + 1, dtype=np.int32)
    cu_seqlens[1:] = lengths_N.cumsum()
    return cu_seqlens


def token_positions(cu_seqlens: NDArray[np.integer]) -> NDArray[np.int64]:
    """(T,) int64: the position of each token in its own sequence, from 0; ``cu_seqlens`` says where each starts."""
    starts_N = cu_seqlens[:-1].astype(np.int64)
    positions_T = starts_N.repeat(cu_seqlens[1:] - cu_seqlens[:-1])
    return np.subtract(multiples(1, positions_T.size).view(np.int64), positions_T, out=positions_T)
