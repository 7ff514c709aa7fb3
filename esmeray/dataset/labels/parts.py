"""Read labelled files in parts: ids and texts as a batch, and the raw label values of each record.

Per-residue labels may be in separate FASTA files, as biotrainer and FLIP write them. ``labels_file`` has, below each
header (``>id SET=train VALIDATION=False``), a letter per residue in place of the sequence. ``mask_file`` has a 1 or a 0
per residue; 0 replaces the letter by one that means unknown.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.locate import place_of_record
from esmeray.dataset.fasta.reader import FastaSource, RecordBatch
from esmeray.dataset.fasta.records import Lines, Records, hashes_of, lengths_of
from esmeray.dataset.labels.samples import located_records, message_records
from esmeray.dataset.labels.values import read_values, split_part, text_of
from esmeray.dataset.section import LabelsSection, SampleSection
from esmeray.dataset.store.conversion import sample_batches
from esmeray.dataset.store.ingest import CleanBlock, Ingest
from esmeray.dataset.table import Columns, Table, is_missing, is_table_name, missing_note

_KEEPS = "data.labels.not_missing"

FLIP_COLUMNS = ("validation", "VALIDATION", "Validation")
"""Name of the column or attribute in addition to the split column; a true value turns train into validation."""

_SAMPLE_PATTERN = r"^(?P<label>\w+)_\d+$"
"""Default pattern of the label in an id of the embedded labelled samples."""


class LabelledPart(NamedTuple):
    """Some records of a file.

    Attributes:
        batch: ids and texts.
        labels: values of the label columns, per record; empty if labels are not read.
        groups: name of each record's group; None if there is no such column.
        splits: values (split, validation) of the split column and of FLIP's column; None without a split column.
        missing: returns the message for the record at an index if it has no label.
        num_empty: number of rows that were left out because they have no text.
    """

    batch: RecordBatch
    labels: Sequence[Sequence[Any]] = ()
    splits: list[Any] | None = None
    groups: Sequence[Any] | None = None
    missing: Callable[[int], str] = str
    num_empty: int = 0


def place_in_file(path: Path, number: int) -> str:
    """Return file and row, or file, line and record, of the record with this number, for a message."""
    return f"{path}, row {number}" if is_table_name(path) else place_of_record(path, number)


@dataclass(frozen=True)
class ResidueLabel:
    """Letters of a sequence's residues, and its split and FLIP's VALIDATION if the header has them.

    ``number`` is the record's number in the file.
    """

    path: Path
    number: int
    header: str
    letters: str
    split: tuple[str | None, str | None] = (None, None)

    @property
    def location(self) -> str:
        return place_of_record(self.path, self.number)


class ResidueLabels:
    """Per-residue labels from ``labels_file`` and ``mask_file``; ``files`` describes the files as they were read."""

    def __init__(self, labels_file: str, settings: LabelsSection, counts: IngestCounts) -> None:
        """Read the files. Comments are counted in ``counts``.

        Raises DataError for repeated ids, masks of another length, and headers without a part.
        """
        self.files: list[SourceFile] = []
        self._counts = counts
        self._refuses_left = settings.missing_labels == "error"
        self._entries = self._read(labels_file)
        self._wanted: set[str] = set()  # ids that were looked up, to find labels without a sequence
        if settings.mask_file is not None:
            masks = self._read(settings.mask_file)
            self._entries = {name: _masked(entry, masks.get(name), settings) for name, entry in self._entries.items()}
        if settings.split_column is not None:
            self._entries = {name: _with_part(entry, settings.split_column) for name, entry in self._entries.items()}

    def get(self, record_id: str) -> ResidueLabel | None:
        """Return the labels of a sequence, or None."""
        self._wanted.add(record_id)
        return self._entries.get(record_id)

    def count_without_sequence(self) -> int:
        """Return the number of labels whose id no sequence has. Raises DataError if the settings refuse them."""
        left = [entry for name, entry in self._entries.items() if name not in self._wanted]
        if left and self._refuses_left:
            more = f" (nor {len(left) - 1:,} more ids)" if len(left) > 1 else ""
            raise DataError(
                f"{left[0].location}: data.source has no sequence with this id{more}; add it, or give "
                "--data.labels.missing_labels skip"
            )
        return len(left)

    def _read(self, source: str) -> dict[str, ResidueLabel]:
        files = FastaSource([source], self._counts)
        entries: dict[str, ResidueLabel] = {}
        for batch in files.batches():
            pairs = zip(batch.records.headers.split(), batch.records.sequences, strict=True)
            for index, (header, letters) in enumerate(pairs):
                origin = batch.origin(index)
                assert origin is not None  # the records come from files
                entry = ResidueLabel(*origin, header.decode("ascii"), letters.decode("ascii"))
                name = (entry.header.split() or [""])[0]
                if name in entries:
                    raise DataError(
                        f"{entry.location}: duplicate id {name!r}, first at {entries[name].location}; remove one"
                    )
                entries[name] = entry
        self.files += files.finished
        return entries


def _masked(entry: ResidueLabel, mask: ResidueLabel | None, settings: LabelsSection) -> ResidueLabel:
    if mask is None:
        raise DataError(
            f"{entry.location}: {settings.mask_file} has no mask for this id; add one, e.g. 1 for each residue"
        )
    if len(mask.letters) != len(entry.letters) or set(mask.letters) - {"0", "1"}:
        raise DataError(
            f"{mask.location}: the mask must have {len(entry.letters)} letters, like the labels "
            f"({entry.location}); write 1 for each residue, or 0 to ignore it in training and metrics"
        )
    pairs = zip(entry.letters, mask.letters, strict=True)
    # Masked residues get the letter for unknown residues, which are neither learnt nor scored.
    return replace(
        entry, letters="".join(letter if known == "1" else settings.unknown_letters[0] for letter, known in pairs)
    )


def _with_part(entry: ResidueLabel, attribute: str) -> ResidueLabel:
    attributes = dict(word.split("=", 1) for word in entry.header.split()[1:] if "=" in word)
    if attribute not in attributes:
        raise DataError(f"{entry.location}: no {attribute}= in the header; write e.g. {attribute}=train")
    # FLIP's encoding of a third part: the SET of validation records is train, too.
    split = attributes[attribute], next(filter(None, map(attributes.get, FLIP_COLUMNS)), None)
    try:
        split_part(*split)
    except ValueError as error:
        raise DataError(f"{entry.location}: {attribute}: {error}") from error
    return replace(entry, split=split)


class LabelledSource:
    """Labelled files, or the embedded sample, read once from start to end.

    ``residue_labels`` replace labels in FASTA headers. ``finished`` describes the files that have been read so far.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        settings: LabelsSection,
        content: Literal["protein", "text"],
        *,
        with_labels: bool,
        sample: SampleSection | None = None,
        residue_labels: ResidueLabels | None = None,
    ) -> None:
        self.paths = paths
        self.bytes_total = sum(path.stat().st_size for path in paths)
        self.finished: list[SourceFile] = []
        self._counts = IngestCounts()
        self._opened: Table | FastaSource | None = None
        self._rows_before = 0  # numbers of rows without an id continue from file to file
        self._settings, self._content, self._with_labels = settings, content, with_labels
        self._sample, self._residue_labels = sample, residue_labels

    @property
    def bytes_read(self) -> int:
        """Bytes on disk of the text that was read so far."""
        return sum(file.bytes for file in self.finished) + (self._opened.bytes_read if self._opened else 0)

    def __iter__(self) -> Iterator[tuple[int, LabelledPart]]:
        """Yield the parts in order, each with the index of its file, from 0; -1 for the sample.

        Raises DataError if a file can't be read or a row has no text or no id; ConfigError if the settings don't locate
        the labels or are for another kind of file.
        """
        if self._sample is not None:
            sample = self._sample
            records = (
                located_records(sample.records, sample.families)
                if self._content == "protein"
                else message_records(sample.records)
            )
            parts = self._fasta_parts(sample_batches(records), _SAMPLE_PATTERN)
            yield from ((-1, labelled_part) for labelled_part in parts)
        for number, path in enumerate(self.paths):
            if is_table_name(path):
                self._opened = table = Table(path, self._wanted_columns(path), self._settings.not_missing)
                parts = self._table_parts(path, table)
            else:
                self._refuse_columns(path)
                self._opened = fasta = FastaSource([str(path)], self._counts)
                parts = self._fasta_parts(fasta.batches())
            yield from ((number, labelled_part) for labelled_part in parts)
            self.finished += self._opened.finished
            self._opened = None

    def cleaned(self, ingest: Ingest) -> Iterator[tuple[int, LabelledPart, CleanBlock | None]]:
        """Yield the parts, each with its cleaned block. At the end, raise one DataError for all refused records."""
        self._counts = ingest.counts
        with ingest.faults.raised_at_end():
            for number, labelled_part in self:
                ingest.counts.records_read += labelled_part.num_empty
                ingest.counts.records_skipped_empty += labelled_part.num_empty
                yield number, labelled_part, ingest.clean(labelled_part.batch) if len(labelled_part.batch) else None

    def places(self, ids: set[str]) -> dict[str, str]:
        """Return the location of the first record with each of these ids. Reads the files again, for errors only."""
        locations: dict[str, str] = {}
        again = LabelledSource(
            self.paths,
            self._settings,
            self._content,
            with_labels=False,
            sample=self._sample,
        )
        for _, labelled_part in again:
            for index, encoded in enumerate(labelled_part.batch.records.ids.split()):
                record_id = encoded.decode("utf-8")
                if record_id in ids and record_id not in locations:
                    origin = labelled_part.batch.origin(index)
                    locations[record_id] = place_in_file(*origin) if origin else "the sample"
            if len(locations) == len(ids):
                break  # a fault further on in the files is not the topic here
        return locations

    def _fasta_parts(
        self, batches: Iterable[RecordBatch], default_pattern: str | None = None
    ) -> Iterator[LabelledPart]:
        """Yield FASTA records with labels from their headers or from ``residue_labels``."""
        for batch in batches:
            if not self._with_labels:
                yield LabelledPart(batch)
            elif self._residue_labels is not None:
                yield self._with_residue_labels(batch, self._residue_labels)
            else:
                yield self._headers_read(batch, default_pattern)

    def _headers_read(self, batch: RecordBatch, default_pattern: str | None) -> LabelledPart:
        pattern = header_pattern(self._settings, default_pattern)
        group = "label" if "label" in pattern.groupindex else 1
        headers = [header.decode("ascii") for header in batch.records.headers.split()]
        labels = [None if match is None else match[group] for match in map(pattern.search, headers)]
        field = self._settings.header_field
        setting = f"header_pattern {pattern.pattern!r}" if field is None else f"header_field {field}"
        return LabelledPart(
            batch,
            labels=[(label,) for label in labels],
            missing=lambda index: (
                f"data.labels.{setting} matches no label in the header {headers[index]!r}"
                + missing_note(labels[index], _KEEPS)
            ),
        )

    def _with_residue_labels(self, batch: RecordBatch, residue_labels: ResidueLabels) -> LabelledPart:
        entries = [residue_labels.get(record_id.decode("ascii")) for record_id in batch.records.ids.split()]
        has_parts = self._settings.split_column is not None
        return LabelledPart(
            batch,
            labels=[(entry and entry.letters,) for entry in entries],
            splits=[entry and entry.split for entry in entries] if has_parts else None,
            missing=lambda _: f"{self._settings.labels_file} has no labels for this id",
        )

    def _refuse_columns(self, path: Path) -> None:
        settings = self._settings
        if not self._with_labels:
            return
        for name, is_set in (
            ("split_column", settings.split_column is not None and not self._residue_labels),
            ("group_column", settings.group_column is not None),
            ("label_columns", len(settings.label_columns) > 1),
        ):
            if is_set:
                raise ConfigError(
                    f"data.labels.{name} applies to tables, but {path} is read as FASTA: remove the setting"
                )

    def _wanted_columns(self, path: Path) -> dict[str, str | None]:
        settings = self._settings
        if self._residue_labels is not None:
            raise ConfigError(
                f"data.labels.labels_file applies to FASTA, but {path} is read as a table: remove the setting"
            )
        columns = [("text_column", settings.text_column), ("id_column", settings.id_column)]
        if self._with_labels:
            columns += [("label_columns", column) for column in settings.label_columns]
            columns += [("split_column", settings.split_column), ("group_column", settings.group_column)]
        wanted: dict[str, str] = {}
        for setting, column in columns:
            if column is not None:
                wanted.setdefault(column, f"data.labels.{setting}")
        # FLIP's columns are read with the split column, if they exist.
        return dict.fromkeys(FLIP_COLUMNS if self._with_labels and settings.split_column else ()) | wanted

    def _table_parts(self, path: Path, table: Table) -> Iterator[LabelledPart]:
        settings = self._settings
        rows_read = 0
        for first_row, columns in table.parts():
            texts = read_values(path, settings.text_column, columns[settings.text_column], text_of, first_row)
            rows_read += len(texts)
            rows = self._rows_with_text(path, table, first_row, texts)
            # Count rows as in the file, including those left out, so that messages and ids refer to the same row.
            numbers = [first_row + row for row in rows]
            ids = self._ids(path, table, first_row, rows, columns)
            sequences = [self._encoded(texts[row]) for row in rows]
            lines = Lines.of(ids)  # the whole header is the id, which may have blanks
            records = Records(
                headers=lines,
                ids=lines,
                residues=b"".join(sequences),
                lengths=lengths_of(sequences),
                id_hashes=hashes_of(ids),
                hashes=hashes_of(sequences),
            )
            kept: Columns = {name: [values[row] for row in rows] for name, values in columns.items()}
            yield LabelledPart(
                batch=_LabelledRows(records, path=path, numbers=numbers, has_ids=settings.id_column is not None),
                labels=self._labels(kept),
                splits=_splits(table, settings.split_column, kept),
                groups=kept.get(settings.group_column or ""),
                missing=partial(self._without_label, table, rows),
                num_empty=len(texts) - len(rows),
            )
        self._rows_before += rows_read

    def _rows_with_text(self, path: Path, table: Table, first_row: int, texts: Sequence[str]) -> list[int]:
        """Return the rows of a part that have a text. Raises DataError for others, unless the settings skip them."""
        # NA may be a message or a name, but never a protein.
        is_text = self._content == "text"
        kept_texts = self._settings.not_missing if is_text else []
        rows = []
        for row, text in enumerate(texts):
            if not is_missing(text, kept_texts):
                rows.append(row)
            elif self._settings.empty_texts == "error":
                column = self._settings.text_column
                note = table.note(column, row, _KEEPS if is_text else "")
                raise DataError(
                    f"{path}, row {first_row + row}: column {column!r} is empty{note}; complete or remove the row, or "
                    "give --data.labels.empty_texts skip"
                )
        return rows

    def _ids(self, path: Path, table: Table, first_row: int, rows: list[int], columns: Columns) -> list[bytes]:
        column = self._settings.id_column
        if column is None:
            return [b"row%d" % (self._rows_before + first_row + row) for row in rows]
        ids = []
        texts = read_values(path, column, columns[column], text_of, first_row)
        for row in rows:
            text = texts[row].strip()
            if not text or "\n" in text or "\r" in text:
                raise DataError(
                    f"{path}, row {first_row + row}: the id in column {column!r} is empty or contains a line "
                    f"break{table.note(column, row, _KEEPS)}; fix the id, or remove data.labels.id_column"
                )
            ids.append(text.encode("utf-8"))
        return ids

    def _encoded(self, text: str) -> bytes:
        # One byte per residue, so that positions stay correct; non-letters are refused later like any bad character.
        return text.encode() if self._content == "text" else text.strip().encode("latin-1", errors="replace")

    def _labels(self, columns: Columns) -> list[tuple[Any, ...]]:
        if not self._with_labels:
            return []
        return list(zip(*(columns[name] for name in self._settings.label_columns), strict=True))

    def _without_label(self, table: Table, rows: list[int], index: int) -> str:
        """Return the message for a record without a label."""
        notes = [f"{name!r}{table.note(name, rows[index], _KEEPS)}" for name in self._settings.label_columns]
        return f"label missing in column {', '.join(notes)}"


def _splits(table: Table, split_column: str | None, columns: Columns) -> list[tuple[Any, Any]] | None:
    """Return the values of the split column and of FLIP's column, which no setting uses for something else."""
    if split_column not in columns:
        return None
    splits = columns[split_column]
    flips = [values for name, values in columns.items() if table.wanted[name] is None]
    if not flips:
        return [(split, None) for split in splits]
    return list(zip(splits, flips[0], strict=True))


@dataclass(frozen=True, kw_only=True)
class _LabelledRows(RecordBatch):
    path: Path
    numbers: list[int]
    has_ids: bool

    def origin(self, index: int) -> tuple[Path, int]:
        return self.path, self.numbers[index]

    def location(self, index: int, residue: int | None = None) -> str:
        character = "" if residue is None else f", character {residue + 1}"
        name = f", record {self.records.ids.split()[index].decode('utf-8')!r}" if self.has_ids else ""
        return f"{self.path}, row {self.numbers[index]}{character}{name}"


def header_pattern(settings: LabelsSection, default: str | None = None) -> re.Pattern[str]:
    """Return the pattern of a label in a FASTA header: its group 'label', otherwise its first group.

    Raises ConfigError if there is no setting, or the pattern is not a regular expression with a group.
    """
    if settings.header_field is not None:
        return re.compile(rf"^\s*(?:\S+\s+){{{settings.header_field}}}(\S+)")
    pattern = settings.header_pattern or default
    if pattern is None:
        raise ConfigError(
            "FASTA labels are read from the headers: set data.labels.header_field or data.labels.header_pattern"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"data.labels.header_pattern {pattern!r} is not a regular expression: {error}") from error
    if not compiled.groups:
        raise ConfigError(f"data.labels.header_pattern {pattern!r} has no group: put (?P<label>...) around the label")
    return compiled
