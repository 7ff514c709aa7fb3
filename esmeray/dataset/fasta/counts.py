"""Record of reading in a manifest: the source files, and counts of changed, skipped and reported records."""

import os
from pathlib import Path

from pydantic import BaseModel, Field

from esmeray.common.publishing import file_xxh128
from esmeray.common.text import counted


class SourceFile(BaseModel, extra="forbid", frozen=True):
    """A source file of a store at the time of conversion.

    ``xxh128`` is the hash of the bytes on disk, before decompression. Manifests of earlier versions lack ``ctime_ns``
    and ``inode``.
    """

    path: str
    # These fields are compared first, so that an unchanged file of hundreds of gigabytes is not read again.
    bytes: int
    mtime_ns: int
    ctime_ns: int | None = None
    inode: int | None = None
    xxh128: str

    @classmethod
    def of(cls, path: Path, status: os.stat_result | None = None, xxh128: str = "") -> "SourceFile":
        """Describe a file. ``status`` and ``xxh128`` are its state when it was read; default: its current state."""
        status = status or path.stat()
        return cls(
            path=str(path.resolve()),
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            inode=status.st_ino,
            xxh128=xxh128 or file_xxh128(path),
        )

    def is_content_of(self, path: Path) -> bool:
        """Return whether a file has this content.

        True if path, size, times and inode are equal. If one differs, the content is compared. An editor that keeps
        size and modification time still changes ctime; a copied or touched file has the same content.
        """
        now = SourceFile.of(path, xxh128=self.xxh128)
        return self == now or (self.bytes == now.bytes and self.xxh128 == file_xxh128(path))


class Counts(BaseModel, extra="forbid"):
    """Counts of what reading did. Fields with a description are reported. A dictionary holds a count per name."""

    files_ignored: dict[str, int] = Field(default={}, description="file{s} ignored in folders because of their names")

    def lines(self) -> list[str]:
        """Return one line for each reported count that is not zero."""
        reported = [(getattr(self, name), field.description) for name, field in type(self).model_fields.items()]
        return [_line(number, noun) for number, noun in reported if number and noun]


class IngestCounts(Counts):
    """Counts of everything that conversion changed, skipped or reported. No change goes uncounted."""

    # Manifests hold the fields by name. A new field needs a default, so that older stores can still be read.
    records_read: int = 0
    comment_lines: int = Field(default=0, description="comment line{s} ignored (they start with ';')")
    records_like_nucleotides: int = Field(
        default=0,
        description="record{s} that look like DNA or RNA: nearly all letters are A, C, G, T, U or N (to refuse them, "
        "set ingest.nucleotides to error)",
    )
    records_upper_cased: int = Field(
        default=0, description="record{s} with lower-case letters, converted to upper case"
    )
    stops_dropped: int = Field(default=0, description="final '*' dropped")
    j_to_x: int = Field(default=0, description="J replaced by X")
    bad_characters_to_x: int = Field(default=0, description="character{s} outside the alphabet replaced by X")
    records_skipped_bad_characters: int = Field(
        default=0, description="record{s} skipped because of characters outside the alphabet"
    )
    records_skipped_empty: int = Field(default=0, description="record{s} without a sequence skipped")
    records_skipped_duplicate_id: int = Field(default=0, description="record{s} skipped because of a duplicate id")
    ids_renamed: int = Field(default=0, description="duplicate id{s} renamed")


def _line(number: int | dict[str, int], noun: str) -> str:
    if isinstance(number, int):
        return counted(number, noun)
    names = [f"{name} ({count:,})".removesuffix(" (1)") for name, count in number.items()]
    return f"{counted(sum(number.values()), noun)}: {', '.join(names)}"


def count_lines(counts: Counts) -> list[str]:
    """Return the lines of the counts, or a single line if nothing was counted."""
    return counts.lines() or ["all records read unchanged"]
