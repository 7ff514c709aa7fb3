"""Batches of labelled proteins, in training mutated at random, and the groups that each belongs to.

Which window of a long sequence is taken and which residues are replaced are functions of (seed, epoch, record) alone,
so that a resumed run sees what one that never stopped does.

Shape legend: R records, N sequences of a batch, T tokens, M labels of a record at most, L levels, C classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.alignment.scoring import scoring
from esmeray.dataset.batches.loader import BatchSource, Indices, SourceBatch
from esmeray.dataset.batches.plan import Groups
from esmeray.dataset.batches.preparation import crop_starts, cropped_lengths
from esmeray.dataset.batches.random_bits import keyed_bits, positional_bits
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.labels.levels import level_ids
from esmeray.dataset.packed_batch import TARGETS
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE
from esmeray.dataset.store.reader import Store
from esmeray.dataset.targets import SparseTargets
from esmeray.dataset.tokens.esm import RESIDUE_TABLE, cumulative_lengths, packed_from_tokens, tokenize_pieces
from esmeray.tasks.contrastive.section import ContrastiveSection

_SHARE, _MUTATED, _RESIDUE = range(21, 24)
"""Purposes of random bits (:func:`~esmeray.dataset.batches.random_bits.keyed_bits`)."""


class GroupSource(BatchSource):
    """Batches of a store of proteins with the groups of each, ``groups_RML`` as :func:`group_ids` gives them.

    ``seed``: of all that is random; None where nothing is.
    """

    def __init__(
        self,
        store: Store,
        groups_RML: NDArray[np.int64],
        section: ContrastiveSection,
        *,
        max_length: int,
        seed: int | None,
    ) -> None:
        self._store, self._groups_RML, self._section = store, groups_RML, section
        self._max_length, self._seed = max_length, seed

    def token_lengths(self, records_N: Indices) -> NDArray[np.int64]:
        return cropped_lengths(self._store.lengths[records_N], self._max_length) + SPECIAL_TOKENS_PER_SEQUENCE

    def batch(self, epoch: int, records_N: Indices) -> SourceBatch:
        whole_N = self._store.lengths[records_N].astype(np.int64)
        lengths_N = cropped_lengths(whole_N, self._max_length)
        starts_N = np.zeros_like(lengths_N)
        if self._seed is not None:
            starts_N = crop_starts(whole_N, self._max_length, records_N, self._seed, epoch)
        tokens_T = tokenize_pieces(self._store.windows(records_N, starts_N, lengths_N))
        lengths_N = lengths_N + SPECIAL_TOKENS_PER_SEQUENCE
        if self._seed is not None and self._section.mutation_share:
            tokens_T = self._mutated(epoch, records_N, tokens_T, lengths_N)
        groups = {TARGETS: torch.from_numpy(self._groups_RML[records_N])}
        batch = packed_from_tokens(tokens_T, lengths_N, records_N, by_sequence=groups)
        return SourceBatch(batch, records_N.size, tokens_T.size)

    def _mutated(
        self, epoch: int, records_N: Indices, tokens_T: NDArray[np.uint8], lengths_N: Indices
    ) -> NDArray[np.uint8]:
        cu_seqlens = cumulative_lengths(lengths_N)
        # From none to twice the share: the model sees near and far relatives of each sequence.
        shares_N = 2 * self._section.mutation_share * _unit(keyed_bits(_SHARE, self._seed or 0, epoch, records_N))
        chosen_T, drawn_T = (
            _unit(positional_bits(keyed_bits(purpose, self._seed or 0, epoch, records_N), cu_seqlens))
            for purpose in (_MUTATED, _RESIDUE)
        )
        sums, residues = _SUBSTITUTES
        is_mutated_T = (chosen_T < shares_N.repeat(lengths_N)) & np.isin(tokens_T, residues)
        codes = sums[tokens_T[is_mutated_T]]
        mutated_T = tokens_T.copy()
        mutated_T[is_mutated_T] = residues[(codes < drawn_T[is_mutated_T, None]).sum(1).clip(max=len(residues) - 1)]
        return mutated_T


def _unit(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) of 53 of the bits, as many as a double has."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _substitutes() -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Of each token id, running sums of the probabilities of the 20 residues that replace it, and the ids of these.

    A score of BLOSUM62 is 2 log2(q / p p') (Henikoff and Henikoff 1992), so that p' 2^(score / 2) is the probability of
    the residue p' opposite p; the residue itself is left out.
    """
    by = scoring()
    codes = by.codes[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)]
    ids = RESIDUE_TABLE[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)]
    odds = np.exp2(by.scores[np.ix_(codes, codes)] / 2.0)
    # The frequencies by which each row of joint probabilities adds up to its own residue's.
    probabilities = odds * np.linalg.solve(odds, np.ones(len(codes)))
    np.fill_diagonal(probabilities, 0.0)
    sums = np.zeros((len(RESIDUE_TABLE), len(codes)))
    sums[ids] = np.cumsum(probabilities / probabilities.sum(1, keepdims=True), axis=1)
    return sums, ids


_SUBSTITUTES = _substitutes()


def group_ids(names: Sequence[str], targets: NDArray | SparseTargets, levels: int) -> NDArray[np.int64]:
    """(R, M, L) the group of each label of a record at each level; IGNORED_TARGET where there is none.

    ``targets``: (R,) indices of ``names``, or sparse lists of them. A label is a.b.c at level 0, a.b at level 1.
    """
    # One label more, the last, for what is none: it has no group at any level.
    ids_CL = level_ids([*names, ""], levels)
    if not isinstance(targets, SparseTargets):
        return ids_CL[np.where(targets < 0, len(names), targets)][:, None]
    counts_R = np.diff(targets.indptr)
    labels_RM = np.full((len(counts_R), max(1, int(counts_R.max(initial=0)))), len(names))
    labels_RM[np.arange(labels_RM.shape[1]) < counts_R[:, None]] = targets.indices
    return ids_CL[labels_RM]


def memberships(groups_RM: NDArray[np.int64], records_N: Indices, members: int) -> tuple[Indices, Groups]:
    """Records and the group of each at one level, by which steps are planned.

    A record stands once for each of its groups, and once where it has none.
    """
    rows, columns = np.nonzero(groups_RM[records_N] >= 0)
    # Labels may share a group at a higher level.
    pairs = np.unique(np.stack([rows, groups_RM[records_N][rows, columns]]), axis=1)
    alone = np.setdiff1d(np.arange(records_N.size), rows)
    # Numbers of their own, below those of groups.
    all_rows = np.concatenate([pairs[0], alone])
    return records_N[all_rows], Groups(np.concatenate([pairs[1], -1 - alone]), members)
