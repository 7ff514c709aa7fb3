"""Table lookup for the ESM alphabet: residues to token ids.

Plain residues are looked up in a 256-entry table. Other text (special tokens, blanks, unknown characters) takes a
slower path with the rules of transformers' ``EsmTokenizer``. Only packing imports torch, so that loader processes start
fast.

Shape legend: T tokens, N sequences, R residues.
"""

import re
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError

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
"""First and last id of residues: the standard 20, then X, B, U, Z, O and the gaps '.' and '-'."""

_IDS = {token: index for index, token in enumerate(VOCABULARY)}
_KNOWN_TOKEN = re.compile("(" + "|".join(map(re.escape, VOCABULARY)) + ")")


RESIDUE_TABLE: NDArray[np.uint8] = np.full(256, UNK, dtype=np.uint8)
"""(256,) uint8: the id of each ASCII residue; <unk> for any other byte."""
RESIDUE_TABLE[[ord(residue) for residue in VOCABULARY[FIRST_RESIDUE : LAST_RESIDUE + 1]]] = range(
    FIRST_RESIDUE, LAST_RESIDUE + 1
)
RESIDUE_TABLE.setflags(write=False)  # shared with all importers

_BETWEEN = b"\xff\xfe"
"""Separator of joined sequences; :data:`_JOINED_TABLE` maps it to <eos><cls>. It is not ASCII, unlike residues."""

_JOINED_TABLE = RESIDUE_TABLE.tobytes()[:-2] + bytes([CLS, EOS])  # for the bytes 0xfe and 0xff


def encode(sequence: str) -> NDArray[np.int64]:
    """Return the (T,) int64 ids of any text between <cls> and <eos>, as ``EsmTokenizer(sequence)["input_ids"]``.

    Between known tokens, each run of other non-blank characters is one <unk>; blanks separate and are dropped.
    """
    residues = np.frombuffer(sequence.encode("latin-1", errors="replace"), dtype=np.uint8)
    ids_T: NDArray[np.integer] = RESIDUE_TABLE[residues]
    if (ids_T == UNK).any():
        ids: list[int] = []
        # Since the pattern has a group, re.split alternates: text between tokens at even indices, tokens at odd ones.
        for index, piece in enumerate(_KNOWN_TOKEN.split(sequence)):
            ids.extend([_IDS[piece]] if index % 2 else [UNK] * len(piece.split()))
        ids_T = np.array(ids)
    return np.concatenate([[CLS], ids_T, [EOS]]).astype(np.int64)


def tokenize_pieces(sequences: Sequence[bytes | memoryview]) -> NDArray[np.uint8]:
    """Return the (T,) uint8 ids of N ASCII sequences, each between its own <cls> and <eos>.

    The sequences are joined with two bytes that map to <eos><cls>. Every byte is looked up once, without Python work
    per sequence. The sequences must not contain these bytes, which is not checked.
    """
    joined = _BETWEEN.join([b"", *sequences, b""])
    # CPython 3.11 translates bytes a third slower than a bytearray, because it checks whether anything changed.
    return np.frombuffer(bytearray(joined).translate(_JOINED_TABLE), dtype=np.uint8)[1:-1]


def pack_sequences(sequences: Sequence[str]) -> "PackedBatch":
    """Pack N whole texts in order, without a store, tokenized as :func:`encode` does.

    The batch's ``records`` count from 0 and it has no ``targets``. Raises DataError if there is no sequence.
    """
    if not sequences:
        raise DataError("no sequences to pack: give at least one")
    tokens = [encode(sequence) for sequence in sequences]
    return packed_from_tokens(np.concatenate(tokens), sequence_lengths(tokens))


def sequence_lengths(sequences: Sequence[Sized]) -> NDArray[np.int64]:
    """Return the length of each sequence, (N,) int64."""
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))


def packed_from_tokens(
    tokens_T: NDArray[np.integer],
    lengths_N: NDArray[np.integer],
    records_N: NDArray[np.int64] | None = None,
    **named: Any,
) -> "PackedBatch":
    """Return the batch of (T,) ids, special tokens included, of N sequences with these lengths.

    ``named`` are further attributes of the batch. Records count from 0 by default.
    """
    import torch  # imported here, so that loader processes, which only need the tables, start without it

    from esmeray.dataset.packed_batch import PackedBatch

    cu_seqlens = cumulative_lengths(lengths_N)
    starts_T = cu_seqlens[:-1].astype(np.int64).repeat(lengths_N)
    # Positions from 0 in each sequence, written into the existing array to stay in the CPU cache.
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
    """Return (N+1,) int32: the start of each sequence when concatenated, and the end."""
    # int32, as attention kernels require; a batch never has more tokens.
    cu_seqlens = np.zeros(lengths_N.size + 1, dtype=np.int32)
    cu_seqlens[1:] = lengths_N.cumsum()
    return cu_seqlens
