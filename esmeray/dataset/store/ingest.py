"""Clean raw records into blocks of a store: validate sequences and ids, and count every repair.

In: :class:`~esmeray.dataset.fasta.reader.RecordBatch` and the policies of
:class:`~esmeray.dataset.section.IngestSection`. Out: :class:`CleanBlock`.

A batch whose letters are all in the alphabet, which is nearly every batch, is checked in one piece. Only a batch that
needs repairs is processed record by record. Texts for classifiers are not checked. Refused records are collected in
one pass, so that a user can fix all of a file at once.

Shape legend: N records of the block.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from esmeray.dataset.fasta.records import Lines, hashes_of, lengths_of, pieces
from esmeray.dataset.section import IngestSection

NUCLEOTIDES = b"ACGTUNacgtun"
NUCLEOTIDE_SHARE = 0.95
"""Smallest share of nucleotide letters at which a sequence counts as DNA or RNA. A protein has about 26 %."""

_MIN_LETTERS = 300
"""Batches with fewer letters are not checked for DNA: a few peptides may consist of A, C, G and T by chance."""

_GLANCE_LETTERS, _GLANCE_SHARE = 256, 0.35
"""Sample size and threshold of the quick check for DNA. A batch is checked record by record if this share of the
sample (letters at even spacing) may be nucleotides. In proteins a quarter of the letters may be, so DNA is found if it
makes up every tenth letter of a batch."""

_OWN_LINES = {ord(">"): "header", ord(";"): "comment"}

SHOWN = 10
"""Maximum number of faults that are shown with their locations; all are counted."""

PlacesOfIds = Callable[[set[str]], dict[str, str]]
"""Function that returns the locations of the first records with these ids."""


@dataclass(frozen=True)
class _Fault:
    """One refused record.

    Attributes:
        problem: the problem and how to fix it; for a repeated id only how to fix it.
        residue: index of the letter that is wrong, if there is one.
        repeats: the id, if an earlier record has it.
    """

    batch: RecordBatch
    index: int
    problem: str
    residue: int | None = None
    repeats: str | None = None


@dataclass(frozen=True)
class CleanBlock:
    """Records ready to be stored.

    Attributes:
        ids: N unique ids.
        residues: all sequences, concatenated.
        lengths: (N,) uint32, none 0.
        hashes: (N,) uint64, XXH3-64 of each sequence.
        kept: (N,) int64, the index of each record in its batch; None if the whole batch was kept.
    """

    ids: Lines
    residues: bytes
    lengths: np.ndarray
    hashes: np.ndarray
    kept: np.ndarray | None = None

    def texts(self) -> list[str]:
        """Return the N sequences or texts."""
        return [text.decode("utf-8") for text in pieces(self.residues, self.lengths)]


class Ingest:
    """Apply the policies to one batch after the other, and remember the ids.

    A set holds the ids, of about 100 bytes each. If ``ids_at_end``, ids that repeat are refused at the end, and 8 bytes
    per id are enough until then: see :meth:`check_ids`. The caller raises ``faults`` at the end, and then discards the
    blocks.
    """

    def __init__(
        self,
        policies: IngestSection,
        places_of_ids: PlacesOfIds = lambda _: {},
        *,
        content: Literal["protein", "text"] = "protein",
        counts: IngestCounts | None = None,
        ids_at_end: bool = False,
    ) -> None:
        """Start with no ids seen. ``places_of_ids`` is for messages. Texts are neither checked nor repaired."""
        self.counts = counts or IngestCounts()
        self.faults = Faults(places_of_ids)
        self.policies = policies
        self._is_text = content == "text"
        self._ids_at_end = ids_at_end and policies.duplicate_ids == "error"
        self._id_hashes: list[np.ndarray] = []
        self._repeated: np.ndarray | None = None
        self._seen: set[bytes] = set()
        self._next_suffix: dict[bytes, int] = {}

    def clean(self, batch: RecordBatch) -> CleanBlock | None:
        """Clean one batch, refused records included. Return None if the policies drop all of it."""
        self.counts.records_read += len(batch)  # includes records that are dropped below
        records = batch.records
        if not self._is_text:
            self._notice_nucleotides(batch)
        # The compiled parser has checked the letters; otherwise check all at once, at memory speed.
        is_plain = self._is_text or records.all_stored or not records.residues.translate(None, STORE_BYTES)
        if not (is_plain and records.lengths.all() and records.ids.lengths.all()):
            kept, sequences = self._clean_each(batch)
            every_id = records.ids.split()
            ids = [every_id[index] for index in kept]
            # After cleaning: a skipped record must not reserve its id for a later record that is kept.
            return self._block(batch, kept, ids, sequences, self._are_new(Lines.of(ids), hashes_of(ids)))
        # From here on the batch can be stored as it is, unless an id repeats: no record becomes a Python object.
        fresh_N = self._are_new(records.ids, records.id_hashes)
        if fresh_N.all():
            return CleanBlock(records.ids, records.residues, records.lengths, records.hashes)
        return self._block(batch, range(len(batch)), records.ids.split(), records.sequences, fresh_N)

    def check_ids(self, batches: Callable[[], Iterable[RecordBatch]]) -> None:
        """Find the ids that repeat, with ``ids_at_end``. If there may be some, the ``batches`` are read once more.

        The faults are then the ones of the second reading, which compares the ids themselves: different ids of one
        XXH3-64 can be constructed.
        """
        hashes = np.sort(np.concatenate([np.empty(0, np.uint64), *self._id_hashes]))
        again = Ingest(self.policies, self.faults.places_of_ids)
        again._repeated = hashes[1:][hashes[1:] == hashes[:-1]]
        if len(again._repeated):
            self.faults.replace(again.faults)
            for batch in batches():
                again.clean(batch)

    def _are_new(self, ids: Lines, hashes_N: np.ndarray) -> np.ndarray:
        """Return (N,) bool, which ids are new, and remember them."""
        fresh_N = np.ones(len(hashes_N), dtype=bool)
        if self._ids_at_end:
            self._id_hashes.append(hashes_N)
            return fresh_N
        compared = fresh_N if self._repeated is None else np.isin(hashes_N, self._repeated)
        texts = ids.split() if compared.any() else []
        for index in np.flatnonzero(compared).tolist():
            fresh_N[index] = texts[index] not in self._seen
            self._seen.add(texts[index])
        return fresh_N

    def _notice_nucleotides(self, batch: RecordBatch) -> None:
        """Count or refuse records that look like DNA or RNA. To count, a sample of letters is checked first."""
        residues = batch.records.residues
        is_refused = self.policies.nucleotides == "error"
        glance = residues[:: 1 + len(residues) // _GLANCE_LETTERS]
        # With the policy error every record is checked, so that none is missed.
        if len(residues) < _MIN_LETTERS or (not is_refused and _share_of_nucleotides(glance) < _GLANCE_SHARE):
            return
        for index, sequence in enumerate(batch.records.sequences):
            if not sequence or _share_of_nucleotides(sequence) < NUCLEOTIDE_SHARE:
                continue
            self.counts.records_like_nucleotides += 1
            if is_refused:
                self.faults.add(
                    "record{s} that look like DNA or RNA",
                    batch,
                    index,
                    "nearly all letters are A, C, G, T, U or N, as in DNA or RNA; translate it to protein, or give "
                    "--data.ingest.nucleotides warn",
                )

    def _block(
        self, batch: RecordBatch, kept: Sequence[int], ids: list[bytes], sequences: list[bytes], fresh_N: np.ndarray
    ) -> CleanBlock | None:
        """Build a block of the records at ``kept``; ``fresh_N`` marks the ids that are new."""
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
                    "header{s} without an id", batch, index, "the header has no id; write one directly after '>'"
                )
                continue
            cleaned = CleanSequence(raw, False, False, 0, 0) if self._is_text else clean(raw)
            residues = self._without_bad(batch, index, cleaned)
            if residues is None:
                continue
            # After the repairs, because a record with only a stop codon is empty, too.
            if not residues and self.policies.empty_sequences == "skip":
                self.counts.records_skipped_empty += 1
                continue
            if not residues:
                self.faults.add(
                    "header{s} without a sequence",
                    batch,
                    index,
                    "the record has no sequence; complete or remove it, or give --data.ingest.empty_sequences skip",
                )
            kept.append(index)
            sequences.append(residues)
            repaired.append(cleaned)
        self.counts.records_upper_cased += sum(cleaned.upper_cased for cleaned in repaired)
        self.counts.stops_dropped += sum(cleaned.stop_dropped for cleaned in repaired)
        self.counts.j_to_x += sum(cleaned.j_to_x for cleaned in repaired)
        return kept, sequences

    def _without_bad(self, batch: RecordBatch, index: int, cleaned: CleanSequence) -> bytes | None:
        """Apply the policy for bad characters. Return the residues, or None if the record is dropped."""
        if not cleaned.num_bad:
            return cleaned.residues
        # Before the policies, which would turn the mark into X and join two proteins, or a protein and a comment.
        for mark, meaning in _OWN_LINES.items():
            if mark in cleaned.residues:
                self.faults.add(
                    f"'{chr(mark)}' inside a sequence line",
                    batch,
                    index,
                    f"'{chr(mark)}' inside a sequence line; move the {meaning} to a line of its own",
                    residue=cleaned.residues.index(mark),
                )
                return bad_to_x(cleaned.residues)
        match self.policies.bad_characters:
            case "to_x":
                self.counts.bad_characters_to_x += cleaned.num_bad
                return bad_to_x(cleaned.residues)
            case "skip":
                self.counts.records_skipped_bad_characters += 1
                return None
        # Only the first is named, because a record of another kind may have hundreds.
        at = cleaned.residues.index(cleaned.residues.translate(None, STORE_BYTES)[:1])
        problem = _bad_character(chr(cleaned.residues[at]), "give --data.ingest.bad_characters to_x (or skip)")
        self.faults.add("record{s} with characters outside the alphabet", batch, index, problem, residue=at)
        return bad_to_x(cleaned.residues)

    def _settle_ids(self, batch: RecordBatch, kept: Sequence[int], ids: list[bytes], fresh_N: np.ndarray) -> None:
        """Apply the policy to repeated ids: update ``fresh_N`` (which records stay) and ``ids`` (their names)."""
        for position in np.flatnonzero(~fresh_N).tolist():
            match self.policies.duplicate_ids:
                case "error":
                    self.faults.add(
                        "duplicate id{s}",
                        batch,
                        kept[position],
                        "make ids unique, or give --data.ingest.duplicate_ids first (or rename)",
                        repeats=ids[position].decode("utf-8"),
                    )
                    fresh_N[position] = True  # keep it, so that its other faults are reported in the same run
                case "first":
                    self.counts.records_skipped_duplicate_id += 1
                case "rename":
                    ids[position] = self._renamed(ids[position])
                    self.counts.ids_renamed += 1
                    fresh_N[position] = True

    def _renamed(self, record_id: bytes) -> bytes:
        # Continue from the last number: otherwise each of thousands of equal ids would try all numbers before its own.
        number = self._next_suffix.get(record_id, 2)
        # The new name must be unique, too: the file may already have such an id.
        while (name := b"%b.%d" % (record_id, number)) in self._seen:
            number += 1
        self._next_suffix[record_id] = number + 1
        self._seen.add(name)
        return name


def _share_of_nucleotides(letters: bytes) -> float:
    return 1 - len(letters.translate(None, NUCLEOTIDES)) / len(letters)


def _bad_character(character: str, remedy: str) -> str:
    if character in GAPS:
        return (
            f"the gap character {character!r} of an alignment; remove the gaps, because models read unaligned "
            f"sequences, or {remedy}"
        )
    where = " inside a sequence (only a final '*' is dropped)" if character == "*" else ""
    return f"the character {character!r}{where} is not in the alphabet {STORE_ALPHABET}; fix the record, or {remedy}"


class Faults:
    """Collected faults of refused records; true if there are any.

    At the end, one :class:`~esmeray.common.errors.DataError` counts them by kind and shows the first ones with their
    locations. Locations are found at the end, in one pass over each file.
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
        """Count a fault, and keep it for display if it is among the first.

        ``kind`` is a noun for :func:`~esmeray.common.text.counted`.
        """
        self._counts[kind] += 1
        # Limited, because each fault keeps its batch in memory.
        if len(self._first) < SHOWN:
            self._first.append(_Fault(batch, index, problem, residue, repeats))

    def replace(self, others: "Faults") -> None:
        """Become the other faults, also the ones that are added to them later."""
        self._counts, self._first = others._counts, others._first

    @contextmanager
    def raised_at_end(self, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Raise all faults as one DataError at the end of the block, together with a DataError that ended it.

        ``check`` is called before, and may find more.
        """
        try:
            yield
            check()
        except DataError as error:
            with suppress(DataError):  # what ended the reading ends it again
                check()
            # One message for both, so that a user can fix a file with several problems at once.
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
        kinds += [f"{counted(len(ended_by), 'fault{s}')} that stopped reading"] if ended_by else []
        shown = "" if len(lines) == number else f"; the first {len(lines) - len(ended_by)} follow"
        return [f"{number:,} faults: {', '.join(kinds)}{shown}", *lines]

    def _placed(self) -> list[str]:
        # Sort by batch and record: faults of ids are found after all other faults of a batch.
        numbers = {id(fault.batch): number for number, fault in reversed(list(enumerate(self._first)))}
        first = sorted(self._first, key=lambda fault: (numbers[id(fault.batch)], fault.index))
        # Only FASTA has origins; other batches know the locations of their records.
        origins = [fault.batch.origin(fault.index) if fault.batch.origins else None for fault in first]
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
                lines.append(f"{where}: duplicate id {fault.repeats!r}, first at {first_record}; {fault.problem}")
            else:
                lines.append(f"{where}: {fault.problem}")
        return lines
