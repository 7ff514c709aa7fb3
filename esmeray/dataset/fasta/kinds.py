"""Recognize files that are neither FASTA nor a table by their first bytes, for error messages.

File names are unreliable: workbooks are saved as .csv, tables as .txt, and failed downloads are web pages.
"""

import re
from pathlib import Path

from xopen import xopen

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


def kind_of(path: Path, wanted: str) -> str | None:
    """Return a file's kind and a remedy; None if it may be the wanted kind (FASTA, table or Parquet).

    Plain and compressed files are recognized. The file is opened again, so use this for error messages only.
    """
    with xopen(path, "rb", threads=0) as file:
        # Skip a byte-order mark and FASTA's comments.
        head = re.sub(rb"\A(?:\xef\xbb\xbf)?\s*(?:;[^\n]*\n\s*)*", b"", file.read(1 << 16))
    kinds = _KINDS | _OF_WANTED.get(wanted, {})
    return next((kind for pattern, kind in kinds.items() if re.match(pattern, head, re.DOTALL)), None)
