"""Raw records to a block of a store: what a sequence and an id may be, with every repair counted.

In: :class:`~esmeray.dataset.fasta.reader.RecordBatch` and the policies of
:class:`~esmeray.dataset.section.IngestSection`. Out: :class:`CleanBlock`. A batch whose letters are all in the
alphabet, which is nearly every one, is checked in one piece; only a batch with something to mend is looked at record by
record. Text, which a classifier may read instead of residues, is taken as it is. Refused records are gathered in one
pass, so that a file can be mended in one go.

Shape legend: N records of the block.
"""

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Literal

import numpy as np

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import GAPS, STORE_ALPHABET, STORE_BYTES, CleanSequence, bad_to_x, clean
from esmeray.dataset.fasta.counts import IngestCounts
from esmeray.dataset.fasta.locate import places_of_records
from esmeray.dataset.fasta.reader import RecordBatch
from esmeray.dataset.fasta.records import HashSet64, Kernel, Lines, hashes_of, lengths_of, pieces
from esmeray.dataset.section import IngestSection

NUCLEOTIDES = b"ACGTUNacgtun"
NUCLEOTIDE_SHARE = 0.95
"""From this share of such letters on, a sequence is counted as DNA or RNA. A protein has about 26 %."""

_FEWEST_LETTERS = 300
"""In batches with fewer letters nothing is counted as DNA: a few peptides may well consist of A, C, G and T."""

_GLANCE_LETTERS, _GLANCE_SHARE = 256, 0.35
"""A batch is looked at record by record where this share of so many letters, evenly spread, may be nucleotides. Of the
letters of proteins a quarter may; so every tenth letter of DNA in a batch is enough."""

_OWN_LINES = {ord(">"): "header", ord(";"): "comment"}

SHOWN = 10
"""Faults that are shown with their locations; all are counted."""

PlacesOfIds = Callable[[set[str]], dict[str, str]]
"""Gives the locations of the first records with these ids."""


@dataclass(frozen=True)
class _Fault:
    """One refused record.

    Attributes:
        problem: what is wrong, and what to do; of a repeated id what to do.
        residue: which of its letters is meant, if any.
        repeats: the id, where another record had it before.
    """

    batch: RecordBatch
    index: int
    problem: str
    residue: int | None = None
    repeats: str | None = None


@dataclass(frozen=True)
class CleanBlock:
    """Records as they go into a store.

    Attributes:
        ids: N unique ids.
        residues: all sequences end to end.
        lengths: (N,) uint32, none 0.
        hashes: (N,) uint64, XXH3-64 of each sequence.
        kept: (N,) int64, the index in its batch of each record; None when all of the batch are here.
    """

    ids: Lines
    residues: bytes
    lengths: np.ndarray
    hashes: np.ndarray
    kept: np.ndarray | None = None

    def texts(self) -> list[str]:
        """The N sequences or texts."""
        return [text.decode("utf-8") for text in pieces(self.residues, self.lengths)]


class Ingest:
    """Applies the policies to one batch after the other, remembering the ids that it has met.

    Ids are compared by XXH3-64, for which pairs of different ids with one hash can be constructed. The policy ``error``
    looks ids up before it refuses; the others, which would drop or rename a record, compare a second hash by a secret
    seed, too. ``faults`` are raised at the end by whoever reads, who makes nothing of the blocks then.
    """

    def __init__(
        self,
        policies: IngestSection,
        places_of_ids: PlacesOfIds = lambda _: {},
        kernel: Kernel | None = None,
        *,
        content: Literal["protein", "text"] = "protein",
        counts: IngestCounts | None = None,
    ) -> None:
        """Start with no ids seen. ``places_of_ids`` is for messages; text is neither checked nor mended."""
        self.counts = counts or IngestCounts()
        self.faults = Faults(places_of_ids)
        self._policies = policies
        self._is_text = content == "text"
        self._seen = HashSet64(kernel)
        self._seen_by_seed = HashSet64(kernel)
        self._seed = 0 if policies.duplicate_ids == "error" else 1 + secrets.randbits(63)
        self._next_suffix: dict[bytes, int] = {}

    def clean(self, batch: RecordBatch) -> CleanBlock | None:
        """One batch as a block, refused records included; None when the policies drop all of it."""
        self.counts.records_read += len(batch)  # also those that are left out below
        records = batch.records
        if not self._is_text:
            self._notice_nucleotides(batch)
        # The parser has looked already, if it was the compiled one; else all letters at once, at memory's speed.
        is_plain = self._is_text or records.all_stored or not records.residues.translate(None, STORE_BYTES)
        if not (is_plain and records.lengths.all() and records.ids.lengths.all()):
            kept, sequences = self._clean_each(batch)
            every_id = records.ids.split()
            ids = [every_id[index] for index in kept]
            # After the cleaning: a record that is skipped must not take the id of a later one that is kept.
            return self._block(batch, kept, ids, sequences, self._are_new(ids))
        # From here on the batch is as it goes into the store, unless an id repeats: no record becomes an object.
        fresh_N = self._are_new(records.ids.split() if self._seed else [], records.id_hashes)
        if fresh_N.all():
            return CleanBlock(records.ids, records.residues, records.lengths, records.hashes)
        return self._block(batch, range(len(batch)), records.ids.split(), records.sequences, fresh_N)

    def _are_new(self, ids: list[bytes], hashes_N: np.ndarray | None = None) -> np.ndarray:
        """(N,) bool: which ids were not met before, by their hashes; remembers them. Only a seed needs the ids."""
        fresh_N = self._seen.add(hashes_of(ids) if hashes_N is None else hashes_N)
        return fresh_N | self._seen_by_seed.add(hashes_of(ids, self._seed)) if self._seed else fresh_N

    def _notice_nucleotides(self, batch: RecordBatch) -> None:
        """Count or refuse records of DNA or RNA; to count them, only where a glance at some letters suggests them."""
        residues = batch.records.residues
        is_refused = self._policies.nucleotides == "error"
        glance = residues[:: 1 + len(residues) // _GLANCE_LETTERS]
        # Whoever refuses them wants each found, and pays for the look at every record.
        if len(residues) < _FEWEST_LETTERS or (not is_refused and _share_of_nucleotides(glance) < _GLANCE_SHARE):
            return
        for index, sequence in enumerate(batch.records.sequences):
            if not sequence or _share_of_nucleotides(sequence) < NUCLEOTIDE_SHARE:
                continue
            self.counts.records_like_nucleotides += 1
            if is_refused:
                self.faults.add(
                    "record{s} like DNA or RNA",
                    batch,
                    index,
                    "nearly all letters are A, C, G, T, U or N, as in DNA or RNA; translate it to protein, or give "
                    "--data.ingest.nucleotides warn",
                )

    def _block(
        self, batch: RecordBatch, kept: Sequence[int], ids: list[bytes], sequences: list[bytes], fresh_N: np.ndarray
    ) -> CleanBlock | None:
        """A block of the records at ``kept``, of which ``fresh_N`` says whether their ids are new."""
        self._settle_ids(batch, kept, ids, fresh_N)
        kept_N = np.array(kept, dtype=np.int64)
        if not fresh_N.all():
            ids, sequences = list(compress(ids, fresh_N)), list(compress(sequences, fresh_N))
            kept_N = kept_N[fresh_N]
        if not ids:
            return None
        return CleanBlock(Lines.of(ids), b"".join(sequences), lengths_of(sequences), hashes_of(sequences), kept_N)

    def _clean_each(self, batch: RecordBatch) -> tuple[list[int], list[bytes]]:
        kept: list[int] = []
        sequences: list[bytes] = []
        repaired: list[CleanSequence] = []
        for index, (raw, id_length) in enumerate(zip(batch.records.sequences, batch.records.ids.lengths, strict=True)):
            if not id_length:
                self.faults.add(
                    "header{s} without an id", batch, index, "a header without an id; write one right after '>'"
                )
                continue
            cleaned = CleanSequence(raw, False, False, 0, 0) if self._is_text else clean(raw)
            residues = self._without_bad(batch, index, cleaned)
            if residues is None:
                continue
            # After the repairs: a lone stop codon leaves nothing, too.
            if not residues and self._policies.empty_sequences == "skip":
                self.counts.records_skipped_empty += 1
                continue
            if not residues:
                self.faults.add(
                    "header{s} without a sequence",
                    batch,
                    index,
                    "a header without a sequence; complete or remove the record, or give "
                    "--data.ingest.empty_sequences skip",
                )
            kept.append(index)
            sequences.append(residues)
            repaired.append(cleaned)
        self.counts.records_upper_cased += sum(cleaned.upper_cased for cleaned in repaired)
        self.counts.stops_dropped += sum(cleaned.stop_dropped for cleaned in repaired)
        self.counts.j_to_x += sum(cleaned.j_to_x for cleaned in repaired)
        return kept, sequences

    def _without_bad(self, batch: RecordBatch, index: int, cleaned: CleanSequence) -> bytes | None:
        """The residues with the policy for bad characters applied; None when the record is dropped."""
        if not cleaned.num_bad:
            return cleaned.residues
        # Before the policies, which would make X of it, and one protein of two, or residues of a comment.
        for mark, meaning in _OWN_LINES.items():
            if mark in cleaned.residues:
                self.faults.add(
                    f"'{chr(mark)}' inside a sequence line",
                    batch,
                    index,
                    f"'{chr(mark)}' inside a sequence line; put the {meaning} on a line of its own",
                    residue=cleaned.residues.index(mark),
                )
                return bad_to_x(cleaned.residues)
        match self._policies.bad_characters:
            case "to_x":
                self.counts.bad_characters_to_x += cleaned.num_bad
                return bad_to_x(cleaned.residues)
            case "skip":
                self.counts.records_skipped_bad_characters += 1
                return None
        # The first alone is named: a record of another kind may have hundreds.
        at = cleaned.residues.index(cleaned.residues.translate(None, STORE_BYTES)[:1])
        problem = _bad_character(chr(cleaned.residues[at]), "give --data.ingest.bad_characters to_x (or skip)")
        self.faults.add("record{s} with characters outside the alphabet", batch, index, problem, residue=at)
        return bad_to_x(cleaned.residues)

    def _settle_ids(self, batch: RecordBatch, kept: Sequence[int], ids: list[bytes], fresh_N: np.ndarray) -> None:
        """Apply the policy to ids that are not new: say in the arguments who stays, and under which name."""
        for position in np.flatnonzero(~fresh_N).tolist():
            match self._policies.duplicate_ids:
                case "error":
                    self._refuse_duplicate(batch, kept[position], ids[position])
                    fresh_N[position] = True  # stays, so that its other faults are reported in the same run
                case "first":
                    self.counts.records_skipped_duplicate_id += 1
                case "rename":
                    ids[position] = self._renamed(ids[position])
                    self.counts.ids_renamed += 1
                    fresh_N[position] = True

    def _refuse_duplicate(self, batch: RecordBatch, index: int, record_id: bytes) -> None:
        name = record_id.decode("utf-8")
        if not self.faults:  # otherwise nothing is made of the records in any case
            first = self.faults.places_of_ids({name}).get(name)
            if first is not None and f"{batch.location(index)},".startswith(f"{first},"):
                return  # two ids with one hash: this is the first record of its id
        self.faults.add(
            "id{s} that stood before",
            batch,
            index,
            "make ids unique, or give --data.ingest.duplicate_ids first (or rename)",
            repeats=name,
        )

    def _renamed(self, record_id: bytes) -> bytes:
        # From the last number on: thousands of records of one id would else try all before theirs.
        number = self._next_suffix.get(record_id, 2)
        # The name must be new in turn: the file may hold an id that looks renamed.
        while not self._are_new([b"%b.%d" % (record_id, number)])[0]:
            number += 1
        self._next_suffix[record_id] = number + 1
        return b"%b.%d" % (record_id, number)


def _share_of_nucleotides(letters: bytes) -> float:
    return 1 - len(letters.translate(None, NUCLEOTIDES)) / len(letters)


def _bad_character(character: str, remedy: str) -> str:
    if character in GAPS:
        return f"the gap {character!r} of an alignment; remove the gaps (models read unaligned sequences), or {remedy}"
    where = " inside a sequence (it is dropped at the end alone)" if character == "*" else ""
    return f"the character {character!r}{where} is not in the alphabet {STORE_ALPHABET}; mend the record, or {remedy}"


class Faults:
    """Records refused so far; true when there are some.

    One :class:`~esmeray.common.errors.DataError` at the end counts them by kind and names the first with their
    locations, which are looked up then, in one pass over each file.
    """

    def __init__(self, places_of_ids: PlacesOfIds) -> None:
        self.places_of_ids = places_of_ids
        self._counts: Counter[str] = Counter()
        self._first: list[_Fault] = []

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(
        self,
        kind: str,
        batch: RecordBatch,
        index: int,
        problem: str,
        *,
        residue: int | None = None,
        repeats: str | None = None,
    ) -> None:
        """Count a fault, its kind a noun for :func:`~esmeray.common.text.counted`, and keep it if it is among the
        first."""
        self._counts[kind] += 1
        # No more: each holds its batch, and a file of faults would fill memory.
        if len(self._first) < SHOWN:
            self._first.append(_Fault(batch, index, problem, residue, repeats))

    @contextmanager
    def raised_at_end(self) -> Iterator[None]:
        """Raise all faults as one DataError when the block ends, with the one that ended it if there was one."""
        try:
            yield
        except DataError as error:
            # Both in one message, so that a file with several things wrong is mended in one go.
            if self:
                raise DataError(*self._lines(*error.problems)) from error
            raise
        if self:
            raise DataError(*self._lines())

    def _lines(self, *ended_by: str) -> list[str]:
        number = self._counts.total() + len(ended_by)
        lines = [*self._placed(), *ended_by]
        if number == 1:
            return lines
        kinds = [counted(count, kind) for kind, count in self._counts.most_common()]
        kinds += [f"{counted(len(ended_by), 'fault{s}')} that ended the reading"] if ended_by else []
        shown = "" if len(lines) == number else f"; the first {len(lines) - len(ended_by)}"
        return [f"{number:,} faults: {', '.join(kinds)}{shown}", *lines]

    def _placed(self) -> list[str]:
        # Batch after batch and in the order of the file, though faults of ids are found after all others of a batch.
        numbers = {id(fault.batch): number for number, fault in reversed(list(enumerate(self._first)))}
        first = sorted(self._first, key=lambda fault: (numbers[id(fault.batch)], fault.index))
        origins = [fault.batch.origin(fault.index) for fault in first]
        wanted: defaultdict[Path, list[tuple[int, int | None]]] = defaultdict(list)
        for origin, fault in zip(origins, first, strict=True):
            if origin is not None:
                wanted[origin[0]].append((origin[1], fault.residue))
        located = {path: iter(places_of_records(path, records)) for path, records in wanted.items()}
        repeated = {fault.repeats for fault in first if fault.repeats is not None}
        before = self.places_of_ids(repeated) if repeated else {}
        lines = []
        for origin, fault in zip(origins, first, strict=True):
            where = next(located[origin[0]]) if origin else fault.batch.location(fault.index, fault.residue)
            if fault.repeats is not None:
                first_record = before.get(fault.repeats, "an earlier record")
                lines.append(f"{where}: the id {fault.repeats!r} stands already in {first_record}; {fault.problem}")
            else:
                lines.append(f"{where}: {fault.problem}")
        return lines
