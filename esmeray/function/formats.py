"""Line parsers for files of annotations, scores and weights: GAF, and tables of ids and terms.

In: a file, plain or compressed. Out: rows of an id and the words after it (terms, evidence codes, aspects, numbers),
which the caller interprets. Skipped: comments (``!`` and ``#``), a header, and CAFA's lines without a protein.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from esmeray.common.errors import DataError
from esmeray.dataset.table import numbered_lines

_OTHERS = {
    "GPAD": r"!\s*gpad?-version|(?:[^\t]*\t){5}\s*ECO:",
    "GPI": r"!\s*gpi-version",
    "GAF in an unsupported version": r"!\s*gaf-version(?!:?\s*(?:1\.0|2\.[0-2])\s*$)",
}
"""First lines of unsupported formats. GAF 1.0 to 2.2 have the same columns: before 2.2 the fourth is often empty or
NOT, and 1.0 lacks the last two."""
_OTHER = re.compile("|".join(f"({pattern})" for pattern in _OTHERS.values()), re.IGNORECASE)
_NOT = re.compile(r"\bNOT\b", re.IGNORECASE)
_JOINED = str.maketrans(";,|\"'[]", "       ")
"""Translation table to blanks: separators of terms, and quotes and brackets around a field."""
_BLANKS = re.compile(r"[\s,;]+")
_HEADER = re.compile(r"[^\d:]+")
_CAFA = {"AUTHOR", "MODEL", "KEYWORDS", "ACCURACY", "END"}
"""First words of lines in CAFA's files that name no protein."""


class Row(NamedTuple):
    """A line: its number, its id, and the words after it. ``date`` (YYYYMMDD) is None if the format has no dates."""

    number: int
    id: str
    words: list[str]
    date: str | None = None


def annotation_rows(path: Path, known: Container[str]) -> Iterator[Row]:
    """Yield rows of GAF, with the term, its evidence code and, if it has one, NOT; or rows of a table.

    ``known``: terms of the ontology. Raises DataError for other formats and versions, by their name.
    """
    is_gaf = False
    for number, line in numbered_lines(path):
        other = None if is_gaf else _OTHER.match(line)
        if other:
            name = [*_OTHERS][int(other.lastindex or 1) - 1]
            raise DataError(f"{path}: is {name} ({line[:20].strip()!r}); download the same annotations as GAF 2")
        cells = [cell.strip() for cell in line.split("\t")]
        # GAF without its version line is recognised by its columns.
        is_gaf = is_gaf or line[:4].lower() == "!gaf" or (len(cells) >= 15 and cells[12].startswith("taxon:"))
        if not line.strip() or line[0] in "!#":
            continue
        if not is_gaf:
            yield from table_rows(path, known)
            return
        if len(cells) < 15:
            raise DataError(
                f"{path}, line {number}: expected the 17 columns of GAF, found {len(cells)}; download the file again"
            )
        words = [cells[4], cells[6].upper(), *["NOT"] * bool(_NOT.search(cells[3]))]
        yield Row(number, cells[1], words, cells[13].replace("-", ""))


def table_rows(path: Path, known: Container[str]) -> Iterator[Row]:
    """Yield the rows of a table: an id, then words.

    The id ends at the first tab or blank, or, in a line without tabs, at a comma or semicolon. Words are separated by
    tabs, blanks, ``;``, ``,`` or ``|``. The first line is a header if it has no known term and no digit or colon, which
    ids of proteins and terms have.
    """
    is_first = True
    for number, line in numbered_lines(path):
        if not line or line[0] in "!#" or line.isspace():
            continue
        record_id, *rest = line.split(None, 1) if "\t" in line else _BLANKS.split(line.strip(), 1)
        words = " ".join(rest).translate(_JOINED).split()
        is_text = record_id in _CAFA or (is_first and _HEADER.fullmatch(line) is not None)
        is_first = is_first and record_id in _CAFA
        if not is_text or any(word in known for word in (record_id, *words)):
            # An empty second column means a protein without terms, as in UniProt's tables.
            record_id = "" if line[0] == "\t" else record_id.strip(' "')
            yield Row(number, record_id, words or [""] * ("\t" in line))
