"""A small store made anew for a test that damages it."""

from pathlib import Path

from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import convert


def write_fasta(path: Path, records: list[tuple[str, str]]) -> Path:
    """A plain FASTA file of these records."""
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    return path


def make_store(folder: Path, records: list[tuple[str, str]], **settings: object) -> Path:
    """A store of these records in ``folder/store``."""
    source = write_fasta(folder / "in.fasta", records)
    convert([str(source)], folder / "store", IngestSection(), **settings)
    return folder / "store"
