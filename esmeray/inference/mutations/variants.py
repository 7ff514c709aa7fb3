"""Parse mutants of a protein from notations and whole sequences into sets of substitutions, and write them.

Every notation of a mutant is parsed to the same value: its substitutions in the order of their positions, without
synonyms. The wild type is the empty set. The grammar, in any letter case:

    mutant     wild type | change, or several with one of : ; , / | & + _ - or blanks between them
    wild type  WT | wildtype | _wt | _sy | =
    change     A24G | Ala24Gly | 24G (the letter before is the sequence's) | A24= | A24A (a synonym)
               | Ala24_Cys25delinsGlyAsp (as many residues as before: a substitution of each)
    no score   A24* | Ala24Ter | A24del | A24- | A24_C25del | A24_C25insG | A24dup | A24_C25delinsG | A24fs
               | Ala24ProfsTer5 | Ter287GlnextTer5 | A24? | p.? | p.0

A change, and the mutant, may have the prefix p. and brackets. A mutant with p. may have a target before it, e.g.
NP_000509.1:p.[Ala24Gly;Cys25Asp]. The grammar covers the protein variants of MAVE-HGVS
(https://mavedb.org/docs/mavehgvs/spec.html) and the notations of ProteinGym, Enrich2 and EVOLVEpro.

This module does not import torch, because the service uses it to parse mutations. An offset counts from 0. A position
counts from the number of the wild type's first residue.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS

_SAME = "="
_NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR TER"
_LETTERS = dict(zip(_NAMES.split(), AMINO_ACIDS + "*", strict=True))
_NAME = re.compile("|".join(_LETTERS))
_NAMED_POSITION = re.compile(rf"(?:{_NAME.pattern})[0-9]|[0-9](?:{_NAME.pattern})")
_WILD_TYPES = {"WT", "WILDTYPE", "WILD TYPE", "WILD-TYPE", "WILD_TYPE", "_WT", "_SY", _SAME}
_RESIDUE = rf"[{AMINO_ACIDS}]?0*[1-9][0-9]{{0,5}}"
_CHANGE = re.compile(
    rf"(?P<named>{_RESIDUE}(?P<range>_{_RESIDUE})?)"
    rf"(?:(?P<new>(?(range)(?!)|[{AMINO_ACIDS}{_SAME}]))|(?P<a_stop>\*)"
    rf"|(?P<a_delins>DELINS(?P<inserted>[{AMINO_ACIDS}]+)|DELINS.+)|(?P<a_deletion>-|DEL[A-Z0-9]*)"
    r"|(?P<an_insertion>INS[A-Z0-9*]+)|(?P<a_duplication>DUP[A-Z0-9]*)|(?P<an_unknown_effect>\?)"
    rf"|[{AMINO_ACIDS}]?(?:(?P<a_frameshift>FS[*X]?(?:[0-9]+|\?)?)|(?P<an_extension>EXT[A-Z0-9*?-]+)))"
    # The stop codon is after the last residue: a change of it changes no residue of the protein.
    r"|(?P<a_changed_stop>\*[0-9]+.+)"
    # p.? and p.0: the effect on the protein is unknown, or there is no protein.
    r"|(?P<an_unknown_protein>\?|0\??)"
)
# The lookahead excludes changes, which are part of the mutant, e.g. Ala24Gly:p.Cys25Asp. An accession such as Q9Y6K9
# starts like one.
_TARGET = re.compile(
    rf"\A(?!P\.|(?:{_NAME.pattern}|[{AMINO_ACIDS}])?[0-9]+(?:{_NAME.pattern}|DEL|INS|DUP|FS|[^A-Z0-9:]|[A-Z](?![A-Z0-9])))"
    r"\w[\w.|()-]*:(?=P\.)"
)
_MARKS = re.compile(r"\bP\.|[][()]")
_TWO_ALLELES = re.compile(r"\];\[|\(;\)")
# Separators between changes only: A24_C25del is one change, and so is A24-, a deletion.
_SEPARATOR = re.compile(r"\s*[:;,/|&+]\s*|\s+|(?<=[A-Z*=?])(?:_|-(?=[A-Z]))")


class UnscoredError(ValueError):
    """A mutant without a score, by its notation. The message starts with its kind, such as a stop."""


class Change(NamedTuple):
    """One change of a notation.

    Attributes:
        named: named letters, empty for any, with their positions.
        new: new letters from the first of these positions on; = for unchanged.
        kind: kind of change; empty for substitutions.
    """

    named: list[tuple[str, int]]
    new: str
    kind: str


def read_changes(text: str) -> list[Change]:
    """Parse a notation without checking it against the wild type. The wild type has no changes. Raises ValueError."""
    text = _TARGET.sub("", text.strip().upper(), count=1)
    if not text:
        raise ValueError("is empty or a missing value such as NaN")
    if _TWO_ALLELES.search(text):
        raise ValueError("describes two alleles; write one row per mutant")
    text = _MARKS.sub("", text)
    if _NAMED_POSITION.search(text):
        text = _NAME.sub(lambda name: _LETTERS[name[0]], text)
    if text in _WILD_TYPES:
        return []
    # Among several parts, = says that the rest is as in the wild type.
    return [_change(part) for part in _SEPARATOR.split(text) if part != _SAME]


def _change(text: str) -> Change:
    match = _CHANGE.fullmatch(text)
    if match is None:
        raise ValueError("is not a mutation; write it like A12G")
    named = [(letter, int(position)) for letter, position in re.findall("([A-Z]?)([0-9]+)", match["named"] or "")]
    new = match["new"] or match["inserted"] or ""
    if new and len(new) == named[-1][1] - named[0][1] + 1:
        return Change(named, new, "")
    return Change(named, "", str(match.lastgroup).replace("_", " "))


class Mutation(NamedTuple):
    """A substitution of one residue."""

    wild: str
    offset: int
    mutant: str


@dataclass(frozen=True)
class Mutant:
    """Substitutions in the order of their offsets, without synonyms; or a sequence of another length."""

    mutations: tuple[Mutation, ...] = ()
    whole: str | None = None

    def sequence(self, wild: str) -> str:
        letters = list(wild if self.whole is None else self.whole)
        for mutation in self.mutations:
            letters[mutation.offset] = mutation.mutant
        return "".join(letters)


WILD_TYPE = Mutant()


@dataclass(frozen=True)
class Protein:
    """The wild type, the number of its first residue, and its name if there are several."""

    sequence: str
    first: int = 1
    name: str = ""

    def mutant(self, text: str) -> Mutant:
        """Parse a notation of the grammar above.

        Raises ValueError, whose message does not repeat residues; :class:`UnscoredError` for a mutant without a score.
        """
        changes = read_changes(text)
        for letter, position in (residue for change in changes for residue in change.named):
            offset = position - self.first
            if not 0 <= offset < len(self.sequence):
                last = self.first + len(self.sequence) - 1
                raise ValueError(f"position {position} is outside the sequence ({self.first} to {last})")
            # Usually the numbering starts elsewhere, and the scores would be for other mutants.
            if letter not in ("", self.sequence[offset]):
                raise ValueError(f"the sequence has another residue at position {position}")
        starts = [(change.named[0][1] - self.first, change.new) for change in changes if not change.kind]
        letters = [(offset, letter) for start, new in starts for offset, letter in enumerate(new, start)]
        # Sorted, so that all notations of a mutant are equal, and it is computed once.
        mutations = [Mutation(self.sequence[offset], offset, letter) for offset, letter in sorted(letters)]
        for before, after in pairwise(mutations):
            if before.offset == after.offset:
                raise ValueError(f"position {after.offset + self.first} is mutated twice")
        for mutation in mutations:
            if mutation.wild not in AMINO_ACIDS:
                raise ValueError(f"position {mutation.offset + self.first} of the sequence is not an amino acid")
        for kind in (change.kind for change in changes if change.kind):
            raise UnscoredError(f"{kind} has no score")
        return Mutant(tuple(mutation for mutation in mutations if mutation.mutant not in (mutation.wild, _SAME)))

    def hint(self, texts: Iterable[str], setting: str) -> str:
        """Suggest a value of ``setting``, the first residue's number, that matches all residues in the notations.

        Empty if no value matches, or if the protein's own value does.
        """
        named: set[tuple[str, int]] = set()
        for text in texts:
            with suppress(ValueError):
                named.update(residue for change in read_changes(text) for residue in change.named if residue[0])
        lowest = min((position for _, position in named), default=0)
        firsts = [
            first
            for first in range(1, lowest + 1)
            # A slice, because it is empty beyond the last residue.
            if all(self.sequence[position - first :][:1] == letter for letter, position in named)
        ]
        hint = f"every mutant would match with {setting} {' or '.join(map(str, firsts[:3]))}"
        return "" if not firsts or self.first in firsts else hint

    def mutant_of(self, sequence: str) -> Mutant:
        """The mutant with this whole sequence, in any letter case. Raises ValueError."""
        # Translations end in a stop, which is not a residue. Files of wild types are read the same way.
        sequence = sequence.strip().upper().removesuffix("*")
        if not sequence:
            raise ValueError("the sequence is empty or a missing value such as NaN")
        if "*" in sequence:
            raise UnscoredError("a stop has no score")
        # Letters of the wild type itself (X) are valid.
        if unknown := {*sequence} - {*self.sequence, *AMINO_ACIDS}:
            raise ValueError(f"{min(unknown)!r} is not an amino acid")
        if len(sequence) != len(self.sequence):
            return Mutant(whole=sequence)
        pairs = enumerate(zip(self.sequence, sequence, strict=True), self.first)
        changes = [f"{position}{new}" for position, (wild, new) in pairs if wild != new]
        return self.mutant(":".join(changes) or _SAME)

    def singles(self) -> Iterator[Mutant]:
        """Yield all single mutants, in the order of positions and of :data:`AMINO_ACIDS`."""
        for offset, wild in enumerate(self.sequence):
            for letter in AMINO_ACIDS if wild in AMINO_ACIDS else "":
                if letter != wild:
                    yield Mutant((Mutation(wild, offset, letter),))

    def text(self, mutation: Mutation) -> str:
        return f"{mutation.wild}{mutation.offset + self.first}{mutation.mutant}"

    def text_of(self, mutant: Mutant) -> str:
        """Text such as A24G:C25D, or the whole sequence of an insertion or deletion."""
        return mutant.whole or ":".join(map(self.text, mutant.mutations))

    def read(self, text: str) -> Mutant:
        """Parse the result of :meth:`text_of`. Raises ValueError."""
        return self.mutant(text) if any(map(str.isdigit, text)) else self.mutant_of(text)


class Variant(NamedTuple):
    """A mutant of one of several proteins."""

    protein: Protein
    mutant: Mutant

    def sequence(self) -> str:
        return self.mutant.sequence(self.protein.sequence)


def marginal_scores(mutants: Sequence[Sequence[Mutation]], logs_L20: NDArray) -> NDArray[np.float64]:
    """(N,) sums of log p(mutant) - log p(wild type) over the mutations; 0 is as good as the wild type, above is better.

    This is the wild-type marginal if the sequence was unmasked, and the masked marginal if each position was masked
    (Meier et al. 2021, NeurIPS, equations 1 and 2). ``logs_L20``: log-probabilities of :data:`AMINO_ACIDS` at each
    offset.
    """
    gains = [
        sum(
            logs_L20[offset, AMINO_ACIDS.index(mutant)] - logs_L20[offset, AMINO_ACIDS.index(wild)]
            for wild, offset, mutant in mutations
        )
        for mutations in mutants
    ]
    return np.array(gains, np.float64)
