"""Small stores and tables for tests of their readers."""

import csv
import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from esmeray.alignment.similarity import identity_clusters
from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.section import DataSection, IngestSection, LabelsSection, TokenizerSection
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.reader import Store

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
PROTEINS = ["MK", "MKV", "MKL", "MKA", "MKC", "MKD", "MKE", "MKF"]
TEXT = TokenizerSection(content="text")


def write_fasta(path: Path, records: Iterable[tuple[str, str]]) -> Path:
    """Write records to a plain FASTA file."""
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    return path


def random_proteins(lengths: Iterable[int]) -> list[tuple[str, str]]:
    random = np.random.default_rng(0)
    return [(f"protein{n}", "".join(random.choice(list(AMINO_ACIDS), length))) for n, length in enumerate(lengths)]


def make_store(folder: Path, records: Iterable[tuple[str, str]] | None = None, **settings: object) -> Path:
    """Write a store ``folder/store`` of these records, by default of 120 random proteins with 5 to 300 residues."""
    if records is None:
        records = random_proteins(np.random.default_rng(0).integers(5, 300, 120))
    source = write_fasta(folder / "in.fasta", records)
    convert([str(source)], folder / "store", IngestSection(), **settings)
    return folder / "store"


def contents(path: Path | Store) -> list[tuple[str, str]]:
    """Return ids and residues of a store; a store given by its path is fully verified."""
    store = Store(path, verify="full") if isinstance(path, Path) else path
    return [(store.id(index), store.text(index)) for index in range(len(store))]


def damage_record(store_path: Path, record: int) -> None:
    """Flip one bit in the residues of a record."""
    residues = Store(store_path).sequence(record).tobytes()
    data = bytearray((store_path / "data.mdb").read_bytes())
    data[data.index(residues)] ^= 1
    # Write a new file, because this process has mapped the old one.
    (store_path / "damaged.mdb").write_bytes(data)
    (store_path / "damaged.mdb").replace(store_path / "data.mdb")


def write_table(path: Path, *rows: tuple) -> Path:
    if path.suffix == ".parquet":
        header, *rest = rows
        columns = zip(*rest, strict=True)
        pq.write_table(pa.table({name: list(values) for name, values in zip(header, columns, strict=True)}), path)
        return path
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    return path


def zipped(*names: str) -> bytes:
    """Bytes of a zip archive with these files, e.g. an Excel workbook's."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, "<xml/>")
    return content.getvalue()


def data_of(*sources: Path, store: Path | None = None, share: float = 0.25, **labels) -> DataSection:
    return DataSection(
        source=[str(source) for source in sources],
        store=None if store is None else str(store),
        validation_share=share,
        labels=LabelsSection(**labels),
    )


def made(data: DataSection, root: Path, tokenizer: TokenizerSection | None = None) -> LabelledStore:
    path = ensure_labelled_store(data, tokenizer or TokenizerSection(), root, clustering=identity_clusters)
    return LabelledStore(path, verify="full")


def proteins(folder: Path, *labels: str, name: str = "in.csv") -> Path:
    return write_table(folder / name, ("sequence", "label"), *zip(PROTEINS, labels, strict=False))
