"""The ESM alphabet by table: residues in, token ids out.

Plain residues are looked up in a 256-entry table; other text (special tokens, blanks, unknown characters) takes a
slower path with the rules of transformers' ``EsmTokenizer``. Only packing needs torch, so that loader processes start
fast.

Shape legend: T tokens, N sequences, R residues.
"""

import re
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE

if TYPE_CHECKING:
    from esmeray.dataset.packed_batch import PackedBatch

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


RESIDUE_TABLE: NDArray[np.uint8] = np.full(256, UNK, dtype=np.uint8)
"""(256,) uint8: the id of each ASCII residue; <unk> for any other byte."""
RESIDUE_TABLE[[ord(residue) for residue in VOCABULARY[FIRST_RESIDUE : LAST_RESIDUE + 1]]] = range(
    FIRST_RESIDUE, LAST_RESIDUE + 1
)
RESIDUE_TABLE.setflags(write=False)  # looked up by whoever imports it

_BETWEEN = b"\xff\xfe"
"""Joins sequences; :data:`_JOINED_TABLE` makes <eos><cls> of it. Outside ASCII, so that no residue is meant by it."""

_JOINED_TABLE = RESIDUE_TABLE.tobytes()[:-2] + bytes([CLS, EOS])  # of the bytes 0xfe and 0xff


def encode(sequence: str) -> NDArray[np.int64]:
    """(T,) int64 ids of any text between <cls> and <eos>, as ``EsmTokenizer(sequence)["input_ids"]`` gives them.

    Between known tokens, each run of other characters without blanks is one <unk>; blanks separate and vanish.
    """
    ids = [CLS]
    # With a group in the pattern, re.split gives what is between the tokens at even and the tokens at odd indices.
    for index, piece in enumerate(_KNOWN_TOKEN.split(sequence)):
        ids.extend([_IDS[piece]] if index % 2 else [UNK] * len(piece.split()))
    return np.array([*ids, EOS], dtype=np.int64)


def tokenize_pieces(sequences: Sequence[bytes | memoryview]) -> NDArray[np.uint8]:
    """(T,) uint8 ids of N ASCII sequences, each between its own <cls> and <eos>.

    They are joined by two bytes that stand for <eos><cls> and are not looked for in the sequences: every byte is looked
    up once, and no work is done in Python for each sequence.
    """
    return _tokenize_joined(_BETWEEN.join([b"", *sequences, b""]))


def _tokenize_joined(joined: bytes) -> NDArray[np.uint8]:
    # CPython 3.11 translates bytes a third slower than a bytearray: it looks whether anything has changed.
    return np.frombuffer(bytearray(joined).translate(_JOINED_TABLE), dtype=np.uint8)[1:-1]


def tokenize_residue_texts(sequences: Sequence[str]) -> NDArray[np.uint8] | None:
    """(T,) uint8 ids of texts, each between its own <cls> and <eos>; None where some character is no residue."""
    # Latin-1 has a byte for each character up to 255; what it lacks is no residue in any case.
    try:
        joined = _BETWEEN.decode("latin-1").join(["", *sequences, ""]).encode("latin-1")
    except UnicodeEncodeError:
        return None
    tokens_T = _tokenize_joined(joined)
    # Every id below the residues' is then one that joining has put there; anything else in the text adds to them.
    is_plain = np.count_nonzero(tokens_T < FIRST_RESIDUE) == SPECIAL_TOKENS_PER_SEQUENCE * len(sequences)
    return tokens_T if is_plain else None


def pack_sequences(sequences: Sequence[str]) -> "PackedBatch":
    """Pack N texts in their order and whole, without a store, tokenized as :func:`encode` does.

    The batch's ``records`` count from 0 and its ``targets`` are None. Raises DataError where there is no sequence.
    """
    if not sequences:
        raise DataError("no sequences to pack: give at least one")
    tokens_T = tokenize_residue_texts(sequences)
    if tokens_T is not None:
        return packed_from_tokens(tokens_T, sequence_lengths(sequences) + SPECIAL_TOKENS_PER_SEQUENCE)
    # Some character is no residue: every sequence takes the slower way.
    tokens = [encode(sequence) for sequence in sequences]
    return packed_from_tokens(np.concatenate(tokens), sequence_lengths(tokens))


def sequence_lengths(sequences: Sequence[Sized]) -> NDArray[np.int64]:
    """(N,) int64: the length of each."""
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))


def packed_from_tokens(
    tokens_T: NDArray[np.integer],
    lengths_N: NDArray[np.integer],
    records_N: NDArray[np.int64] | None = None,
    **named: Any,
) -> "PackedBatch":
    """The batch of (T,) ids, special tokens included, of N sequences of these lengths, and other attributes by name.

    Records count from 0 by default; those of a filler are none.
    """
    import torch  # here, so that loader processes, which need the tables alone, start without it

    from esmeray.dataset.packed_batch import PackedBatch

    cu_seqlens = cumulative_lengths(lengths_N)
    starts_T = cu_seqlens[:-1].astype(np.int64).repeat(lengths_N)
    # From 0 in each sequence; into the array that is there, which saves memory that no cache holds yet.
    positions_T = np.subtract(np.arange(starts_T.size), starts_T, out=starts_T)
    return PackedBatch(
        tokens=torch.from_numpy(tokens_T.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(lengths_N.max()),
        positions=torch.from_numpy(positions_T),
        records=torch.arange(lengths_N.size) if records_N is None else torch.from_numpy(records_N.copy()),
        **named,
    )


def cumulative_lengths(lengths_N: NDArray[np.integer]) -> NDArray[np.int32]:
    """(N+1,) int32: where each sequence starts when they lie end to end, and where the last ends."""
    # int32, which the kernels of attention take; a batch has no more tokens than fit into memory.
    cu_seqlens = np.zeros(lengths_N.size + 1, dtype=np.int32)
    cu_seqlens[1:] = lengths_N.cumsum()
    return cu_seqlens
