"""A manifest's record of reading: the files, and counts of what was changed, left out or noticed."""

import os
from pathlib import Path

from pydantic import BaseModel, Field

from esmeray.common.publishing import file_xxh128
from esmeray.common.text import counted


class SourceFile(BaseModel, extra="forbid", frozen=True):
    """One file that a store was made of, as it was then; ``xxh128`` is of the bytes on disk, compressed or not.

    Manifests of earlier versions lack ``ctime_ns`` and ``inode``.
    """

    path: str
    # All are compared first: a file of hundreds of gigabytes is not read again to find that it is the same.
    bytes: int
    mtime_ns: int
    ctime_ns: int | None = None
    inode: int | None = None
    xxh128: str

    @classmethod
    def of(cls, path: Path, status: os.stat_result | None = None, xxh128: str = "") -> "SourceFile":
        """``status`` and ``xxh128``: of the file as it was read; default: of the file as it is now."""
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
        """Test for a file of the same path, size, times and inode; if one of these differs, of the same content.

        An editor that keeps size and modification time still changes ctime; a copy or a touched file has the content.
        """
        now = SourceFile.of(path, xxh128=self.xxh128)
        return self == now or (self.bytes == now.bytes and self.xxh128 == file_xxh128(path))


class Counts(BaseModel, extra="forbid"):
    """Counts of what reading did; those with a description are reported. A dictionary counts by name."""

    files_ignored: dict[str, int] = Field(default={}, description="file{s} ignored in folders (names of other kinds)")

    def lines(self) -> list[str]:
        """One line for everything that was changed, left out or noticed."""
        reported = [(getattr(self, name), field.description) for name, field in type(self).model_fields.items()]
        return [_line(number, noun) for number, noun in reported if number and noun]


class IngestCounts(Counts):
    """Everything that conversion changed, left out or noticed; nothing is changed without being counted here."""

    # Fields are written to manifests by name: a new one needs a default, or older stores could not be read.
    records_read: int = 0
    comment_lines: int = Field(default=0, description="comment line{s} left out, which start with ';'")
    records_like_nucleotides: int = Field(
        default=0,
        description="record{s} like DNA or RNA, not protein: nearly all letters are A, C, G, T, U or N "
        "(ingest.nucleotides: error refuses them)",
    )
    records_upper_cased: int = Field(default=0, description="record{s} with lower-case letters, upper-cased")
    stops_dropped: int = Field(default=0, description="final '*' dropped")
    j_to_x: int = Field(default=0, description="J replaced by X")
    bad_characters_to_x: int = Field(default=0, description="character{s} outside the alphabet replaced by X")
    records_skipped_bad_characters: int = Field(
        default=0, description="record{s} skipped for characters outside the alphabet"
    )
    records_skipped_empty: int = Field(default=0, description="record{s} skipped for want of a sequence")
    records_skipped_duplicate_id: int = Field(default=0, description="record{s} skipped for an id that stood before")
    ids_renamed: int = Field(default=0, description="id{s} renamed that stood before")


def _line(number: int | dict[str, int], noun: str) -> str:
    if isinstance(number, int):
        return counted(number, noun)
    names = [f"{name} ({count:,})".removesuffix(" (1)") for name, count in number.items()]
    return f"{counted(sum(number.values()), noun)}: {', '.join(names)}"


def count_lines(counts: Counts) -> list[str]:
    """The lines of the counts; a single one where there are none."""
    return counts.lines() or ["every record taken as it stands"]
