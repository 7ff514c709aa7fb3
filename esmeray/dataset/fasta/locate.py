"""Locations of errors in FASTA files (file, line, column, record), and kinds of other files, for error messages.

Conversion doesn't count lines. To locate an error, the file is read again up to that point.
"""

import io
import lzma
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xopen import xopen

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError
else:
    from backports.zstd import ZstdError

_fast_gzip_error: Any = zlib.error
with suppress(ImportError):  # xopen's faster gzip on x86-64 and 64-bit Arm; its error is no subclass of zlib's
    from isal.isal_zlib import IsalError as _fast_gzip_error  # noqa: N813

DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error, _fast_gzip_error, lzma.LZMAError, ZstdError)
"""Exceptions that a flipped bit in compressed data can raise."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf".decode("latin-1")
COMMENT = ";"
"""First letter of a comment line, in Pearson's FASTA."""

_MAX_PIECE_BYTES = 1 << 20
"""Longer lines are read in pieces of this many characters, so that a line need not fit into memory."""

_SHOWN_ID = 60

# File names are unreliable: workbooks are saved as .csv, tables as .txt, and failed downloads are web pages.
_KINDS: dict[bytes, str] = {
    # Workbooks are zip files (other Office programs use other folders); old workbooks are OLE2 files.
    rb"PK\x03\x04(?!.*(?:word|ppt)/).*(?:\[Content_Types\]\.xml|xl/)|\xd0\xcf\x11\xe0": (
        "an Excel workbook; save it as CSV UTF-8"
    ),
    rb"PK\x03\x04.{26}mimetypeapplication/vnd\.oasis\.opendocument\.spreadsheet": (
        "an OpenDocument spreadsheet; save it as CSV UTF-8"
    ),
    rb"PK\x03\x04": "a zip archive; unpack it",
    rb"\xff\xfe|\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]": (
        "text in UTF-16, as Excel's 'Unicode Text'; save it as UTF-8 (in Excel: CSV UTF-8)"
    ),
    rb"ARROW1|FEA1": "an Arrow file; convert it to Parquet",
    rb"\x89HDF": "an HDF5 file; export its data as text",
    rb"\x80[\x02-\x05]": "a Python pickle; export its data as text",
    rb"SQLite format": "an SQLite database; export the table as CSV",
    rb"%PDF": "a PDF; save the data as text",
    rb"\{\\rtf": "Rich Text; save it as plain text",
    rb"@": "looks like FASTQ (it starts with '@'); convert it to protein FASTA",
    rb"<": "looks like HTML or XML (it starts with '<'); was it saved from a web page?",
    rb"[\[{]": "JSON; convert it to CSV or FASTA",
    rb"LOCUS {2,}\S": "a GenBank file; convert it to FASTA",
    rb"ID {3}": "an EMBL or UniProt entry; convert it to FASTA",
    rb"#\s*STOCKHOLM": "a Stockholm alignment; convert it to FASTA without gaps",
    rb"#NEXUS": "a NEXUS file; convert it to FASTA without gaps",
    rb"(?:CLUSTAL|MUSCLE)": "a Clustal alignment; convert it to FASTA without gaps",
    rb"\d+[ \t]+\d+[ \t]*\r?\n": "a PHYLIP alignment; convert it to FASTA without gaps",
    rb"(?:HEADER|ATOM|HETATM|REMARK|CRYST1) ": "a PDB file; 'esmeray data structures' reads structures",
    rb"data_\S*\s+(?:#|_|loop_)": "an mmCIF file; 'esmeray data structures' reads structures",
}
_OF_WANTED: dict[str, dict[bytes, str]] = {
    "FASTA": {
        rb"PAR1|[^\n]*[,;\t]|(?i:\"?(?:sequence|seq|protein|peptide)s?\"?\r?\n)": (
            "a table, but FASTA is needed; classifiers read tables named *.csv, *.tsv or *.parquet ('esmeray train "
            "--config train_config/my_classifier.yaml --data.source FILE'), for anything else write each row as a line "
            "'>id' and its sequence"
        ),
    },
    "table": {
        rb"PAR1": "Parquet; rename it to end in .parquet",
        rb">": "looks like FASTA (it starts with '>'), but its name says table; rename it to end in .fasta",
    },
}


class _Line(NamedTuple):
    """A line, or a piece of a very long one. ``residues``: indices in the record of the residues in it."""

    number: int
    record: int
    record_id: str
    text: str
    residues: range


def _scan(path: Path) -> Iterator[_Line]:
    """Yield every line with its number and record until the end or the first damage. Very long lines come in pieces."""
    number = record = 0
    record_id = ""
    residues = range(0)
    is_start = True  # at the start of a line, not inside one that comes in pieces
    # The caller already reports damage, and needs the location of the last readable line. threads=0: decompress in this
    # process, as the reader does, so that both stop at one place.
    with suppress(*DECOMPRESSION_ERRORS), xopen(path, "rb", threads=0) as file:
        for raw in pieces_of_lines(file, _MAX_PIECE_BYTES):
            number += is_start
            text = raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw
            stripped = text.strip()
            if is_start and stripped.startswith(">"):
                record += 1
                record_id = (stripped[1:].split(None, 1) or [""])[0]
                residues = range(0)
            elif stripped.startswith(COMMENT):
                residues = range(residues.stop, residues.stop)
            else:
                residues = range(residues.stop, residues.stop + len(stripped))
            is_start = raw.endswith("\n")
            yield _Line(number, record, record_id, text, residues)


def pieces_of_lines(file: BinaryIO, longest: int) -> Iterator[str]:
    """Yield lines with their ends (\\n, \\r or \\r\\n) as \\n. Longer lines come in pieces of ``longest`` characters.

    Only the last piece of a line has the end. Latin-1 maps each byte to one character, so any byte can be read.
    """
    return iter(partial(io.TextIOWrapper(file, encoding="latin-1").readline, longest), "")


def _in_record(line: _Line) -> str:
    name = f" {line.record_id[:_SHOWN_ID]!r}" if line.record_id else ""
    return f", record {line.record}{name}" if line.record else ""


def place_of_line(path: Path, test: Callable[[str], bool]) -> str:
    """Return file, line and record of the first line that passes the test."""
    first = next((line for line in _scan(path) if test(line.text)), None)
    # None if the file changed after the error.
    return str(path) if first is None else f"{path}, line {first.number}{_in_record(first)}"


def place_of_record(path: Path, number: int, residue: int | None = None) -> str:
    """Return file, line and id of a record, or file, line and column of one of its residues.

    ``number`` counts records from 1, ``residue`` counts from 0 in the sequence as it was read.
    """
    return places_of_records(path, [(number, residue)])[0]


def places_of_records(path: Path, wanted: list[tuple[int, int | None]]) -> list[str]:
    """Return the locations of several records and residues (see :func:`place_of_record`) in one pass."""
    residues_of = defaultdict(set)
    for number, residue in wanted:
        residues_of[number].add(residue)
    locations: dict[tuple[int, int | None], str] = {}
    last = max(residues_of)
    for line in _scan(path):
        # Stop early: a file may have millions of records after the last requested one.
        if line.record > last:
            break
        for residue in residues_of.get(line.record, ()):
            if residue is None:
                locations.setdefault((line.record, None), f"{path}, line {line.number}{_in_record(line)}")
            elif residue in line.residues:
                column = f"column {line.residues.index(residue) + 1}"
                locations[line.record, residue] = f"{path}, line {line.number}, {column}{_in_record(line)}"
    return [locations.get((number, residue), f"{path}, record {number}") for number, residue in wanted]


def places_of_ids(paths: list[Path], ids: set[str]) -> dict[str, str]:
    """Return file and line of the first record with each of these ids, in one pass over the files."""
    locations: dict[str, str] = {}
    for path in paths:
        for line in _scan(path):
            if line.record_id in ids and line.record_id not in locations:  # a record's first line is its header
                locations[line.record_id] = f"{path}, line {line.number}"
    return locations


def damage(path: Path, error: Exception) -> str:
    """Describe a decompressor's error."""
    if isinstance(error, EOFError):
        return f"{path}: the compressed file is truncated; copy or download it again"
    kind = path.suffix.lstrip(".") or "compressed"
    return f"{path}: damaged, or not a {kind} file despite its name ({error}); download it again, or rename it"


def kind_of(path: Path, wanted: str) -> str | None:
    """Return a file's kind and a remedy; None if it may be the wanted kind (FASTA, table or Parquet).

    Plain and compressed files are recognized. The file is opened again, so use this for error messages only.
    """
    with xopen(path, "rb", threads=0) as file:
        # Skip a byte-order mark and FASTA's comments.
        head = re.sub(rb"\A(?:\xef\xbb\xbf)?\s*(?:;[^\n]*\n\s*)*", b"", file.read(1 << 16))
    kinds = _KINDS | _OF_WANTED.get(wanted, {})
    return next((kind for pattern, kind in kinds.items() if re.match(pattern, head, re.DOTALL)), None)
