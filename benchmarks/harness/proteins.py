"""The proteins that every stage works on: the user's, or the UniRef90 sample of development, or the embedded sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dnaio
import numpy as np
from dnaio.exceptions import FileFormatError

from benchmarks.harness.stage import REPOSITORY, Facts
from esmeray.common.errors import DataError
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.sample import sample_records

MAX_RESIDUES = 1022
"""Residues that ESM-2 was trained on; every contender crops longer proteins at their start to this."""

DEVELOPMENT_DATA = REPOSITORY.parent / "shared" / "data"
_UNIREF90 = DEVELOPMENT_DATA / "uniref90_10k.fasta.gz"
_SAMPLE_RECORDS, _SAMPLE_FAMILIES = 10_000, 200


@dataclass(frozen=True)
class Proteins:
    """Sequences and where they are from."""

    source: str
    sequences: list[str]

    @property
    def facts(self) -> Facts:
        """Description for a result."""
        return {"proteins from": self.source, "proteins there": len(self.sequences)}


def read_proteins(fasta: Path | None) -> Proteins:
    """All proteins at hand, in the order of the file. Raises DataError where it can't be read as FASTA."""
    path = fasta or (_UNIREF90 if _UNIREF90.is_file() else None)
    if path is None:
        records = sample_records(_SAMPLE_RECORDS, _SAMPLE_FAMILIES, seed=0)
        return Proteins("embedded sample", [sequence for _, sequence in records])
    try:
        with dnaio.open(path) as reader:
            # As a store reads them: the peers' tokenizers know neither lower case nor the stop of a translation.
            sequences = [record.sequence.upper().rstrip("*") for record in reader]
    except (OSError, EOFError, FileFormatError) as error:
        raise DataError(f"{path}: can't be read as FASTA: {error}") from error
    if not sequences or not all(sequences):
        raise DataError(f"{path}: no proteins, or a header without a sequence; choose another --fasta")
    return Proteins(path.name, sequences)


def spread_by_length(sequences: Sequence[str], number: int) -> list[str]:
    """So many of the sequences that their lengths are distributed as those of all, the longest among them.

    Cropped to :data:`MAX_RESIDUES`; in the order of the file.
    """
    number = min(number, len(sequences))
    by_length = np.argsort([len(sequence) for sequence in sequences], kind="stable")
    # Evenly over the ranks, ends included: the longest decides the memory, and a random choice may miss it.
    ranks = np.linspace(0, len(sequences) - 1, number).round().astype(int)
    return [sequences[index][:MAX_RESIDUES] for index in sorted(by_length[ranks])]


def every_nth(sequences: Sequence[str], number: int) -> Sequence[str]:
    """About so many of the sequences, spread over the file."""
    return sequences[:: max(1, len(sequences) // number)]


def write_fasta(path: Path, sequences: Sequence[str], records: int) -> int:
    """Write so many records with ids of their own, the sequences repeated in turn, 60 residues a line; return bytes."""
    # Wrapped once for each sequence, however often it is repeated.
    wrapped = ["\n".join(s[at : at + 60] for at in range(0, len(s), 60)) for s in sequences]
    with path.open("w", encoding="ascii") as file:
        for number in range(records):
            file.write(f">protein{number:08d} of the benchmark\n{wrapped[number % len(wrapped)]}\n")
    return path.stat().st_size


def make_store(fasta: Path | str, target: Path | str) -> Path:
    """Convert a FASTA file to a store; return its folder."""
    convert([str(fasta)], Path(target), IngestSection())
    return Path(target)


def write_store(folder: Path, sequences: Sequence[str], records: int | None = None) -> Path:
    """``folder/store`` from ``folder/proteins.fasta``, both with so many records, or one of each sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    fasta = folder / "proteins.fasta"
    write_fasta(fasta, sequences, records or len(sequences))
    return make_store(fasta, folder / "store")
