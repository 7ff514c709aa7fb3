"""A manifest's record of reading: the files, and counts of what was changed, left out or noticed."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from common.publishing import file_xxh128
from common.text import counted


class SourceFile(BaseModel):
    """One file that a store was made of, as it was then; ``xxh128`` is of the bytes on disk, compressed or not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    bytes: int
    mtime_ns: int
    xxh128: str

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """The file as it is now."""
        status = path.stat()
        checksum = file_xxh128(path)
        return cls(path=str(path.resolve()), bytes=status.st_size, mtime_ns=status.st_mtime_ns, xxh128=checksum)


class IngestCounts(BaseModel):
    """Everything that conversion changed, left out or noticed; nothing is changed without being counted here."""

    model_config = ConfigDict(extra="forbid")

    records_read: int = 0
    records_like_nucleotides: int = 0
    records_upper_cased: int = 0
    stops_dropped: int = 0
    j_to_x: int = 0
    bad_characters_to_x: int = 0
    records_skipped_bad_characters: int = 0
    records_skipped_empty: int = 0
    records_skipped_duplicate_id: int = 0
    ids_renamed: int = 0


COUNT_LABELS = {
    "records_like_nucleotides": (
        "record{s} like DNA or RNA, not protein: nearly all letters are A, C, G, T, U or N (ingest.nucleotides: error "
        "refuses them)"
    ),
    "records_upper_cased": "record{s} with lower-case letters, upper-cased",
    "stops_dropped": "final '*' dropped",
    "j_to_x": "J replaced by X",
    "bad_characters_to_x": "character{s} outside the alphabet replaced by X",
    "records_skipped_bad_characters": "record{s} skipped for characters outside the alphabet",
    "records_skipped_empty": "record{s} skipped for want of a sequence",
    "records_skipped_duplicate_id": "record{s} skipped for an id that stood before",
    "ids_renamed": "id{s} renamed that stood before",
    "records_skipped_missing_label": "record{s} skipped for want of a label",
    "labels_without_sequence": "record{s} of labels without a sequence, left out",
    "label_values_missing": "number{s} missing in records that have others",
    "records_unseen_label": "held-out record{s} left out for a label that training lacks",
    "residues_unseen_label": "held-out residue{s} not judged, whose letter training lacks",
    "held_out_also_in_training": "held-out record{s} whose sequence is in training too, which flatters the metrics",
}


UNCHANGED = "every record taken as it stands"


def count_lines(counts: IngestCounts) -> list[str]:
    """One line for everything that was changed, left out or noticed; a single one where nothing was."""
    done = [(getattr(counts, name, 0), label) for name, label in COUNT_LABELS.items()]
    return [counted(number, label) for number, label in done if number] or [UNCHANGED]
