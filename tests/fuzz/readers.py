"""Readers of foreign files, each with small intact files as seeds."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from esmeray.common.publishing import refuse_existing
from esmeray.dataset.embeddings.arrays import open_arrays, write_arrays
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.labels.labelled_file import read_labelled
from esmeray.dataset.section import IngestSection, LabelsSection, TokenizerSection
from esmeray.dataset.store.conversion import check
from esmeray.dataset.store.reader import Store
from esmeray.dataset.structures.files import read_structures
from esmeray.dataset.structures.store import StructureCounts
from esmeray.dataset.table import Table
from esmeray.dataset.tokens.model_folder import read_settings
from esmeray.function.annotations import read_accretion, read_annotations, read_scores
from esmeray.function.ontology import read_ontology
from esmeray.model.export.exported_folder import task_of
from esmeray.train_config.loading import SHIPPED
from esmeray.training.config import load_config
from tests.dataset.stores import make_store, random_proteins
from tests.embeddings import make_embeddings, random_vectors
from tests.function.test_ontology import HEADER, term
from tests.inference.index.test_hostile import make_sound, sealed, use
from tests.structures import EACH, folds, pdb_lines, write_models


@dataclass(frozen=True)
class Reader:
    """A reader, the name of its file, and a function that writes intact files, and other needed files, to a folder."""

    file: str
    seeds: Callable[[Path], list[bytes]]
    read: Callable[[Path], object]
    may_be_gzip: bool = False


_TERMS = term("GO:1") + term("GO:2", "alt_id: GO:9", "is_a: GO:1 ! one") + term("GO:4", "is_obsolete: true")
OBO = (HEADER + _TERMS + term("GO:3", "relationship: part_of GO:2 ! two", namespace="biological_process")).encode()
_GAF_ROW = "UniProtKB\tP{n}\tX\tenables\tGO:{term}\tPMID:1\tEXP\t\tF\t\t\tprotein\ttaxon:1\t20200101\tGO\t\t"
GAF = "\n".join(["!gaf-version: 2.2", *(_GAF_ROW.format(n=n, term=n % 2 + 1) for n in range(5)), ""]).encode()
TSV = b"P1\tGO:1\nP2\tGO:2\nP3\tGO:9\n"
SCORES = b"P1\tGO:1\t0.5\nP2\tGO:2\t1\nP3\tGO:9\t0.01\n"
FASTA = b">sp|P1 a\nMKVLLA\nACDEF\n>b\nMKV*\n>c\nacgtu\n"
WANTED = {"text": "data.labels.text_column", "label": "data.labels.label_columns"}
YAML = b"run: {name: a}\nbatch: &b\n  tokens: 128\n  global_tokens: 256\ndata:\n  source: [sample]\n"


def structure(suffix: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [
        write_models(folder / f"seed{suffix}", pdb_lines(fold)[:60]).read_bytes() for fold in folds(3)
    ]


def read_structure(path: Path) -> object:
    return read_structures(path, EACH, StructureCounts(), min_residues=10)


def contents(*given: bytes) -> Callable[[Path], list[bytes]]:
    return lambda _: list(given)


def parquet(folder: Path) -> list[bytes]:
    contents = []
    for compression in ("none", "snappy", "zstd"):
        file = io.BytesIO()
        table = pa.table({"text": ["MKV", "ACD", None] * 5, "label": [1.5, None, 2.0] * 5, "other": [["a"]] * 15})
        pq.write_table(table, file, compression=compression, use_dictionary=compression == "snappy")
        contents.append(file.getvalue())
    return contents


def read_table(path: Path) -> object:
    return Table(path, WANTED).columns()


def read_labels(path: Path) -> object:
    labels = LabelsSection(kind="multiclass", text_column="text", label_columns=["label"])
    return read_labelled([str(path)], labels, TokenizerSection(), IngestSection())


def ontology(path: Path) -> Any:
    return read_ontology(path.with_name("seed.obo"))


def with_ontology(content: bytes) -> Callable[[Path], list[bytes]]:
    def seeds(folder: Path) -> list[bytes]:
        (folder / "seed.obo").write_bytes(OBO)
        return [content]

    return seeds


def read_predictions(path: Path) -> object:
    return read_scores(path, ontology(path), {"molecular_function": ["P1", "P2", "P3"]})


def arrays(folder: Path) -> list[bytes]:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    write_arrays(folder / "seed", {"hashes": np.arange(4, dtype=np.uint64), "rows": values})
    return [(folder / "seed").read_bytes()]


def embeddings(file: str, file_format: str) -> Reader:
    """Reader of an embedding folder in which one file is mutated."""

    def seeds(folder: Path) -> list[bytes]:
        made = make_embeddings(folder / "made", random_vectors(12, 4), file_format=file_format)
        for path in made.iterdir():
            path.rename(folder / path.name)
        return [(folder / file).read_bytes()]

    def read(path: Path) -> object:
        opened = read_embeddings(path.parent)
        return opened.ids, opened.lengths, opened.sequences, opened[0:12], opened[0]

    return Reader(file, seeds, read)


def of_index(file: str) -> Reader:
    """Reader of a compressed index in which one file is mutated and the checksums are updated."""

    def seeds(folder: Path) -> list[bytes]:
        make_sound(folder / "made")
        for path in (folder / "made" / "compressed").iterdir():
            path.rename(folder / path.name)
        return [(folder / file).read_bytes()]

    def read(path: Path) -> object:
        folder = path.parents[len(Path(file).parts) - 1]
        faiss.omp_set_num_threads(1)  # a fork has no threads of its parent
        sealed(folder)
        return use(folder)

    return Reader(file, seeds, read)


def store_manifest(folder: Path) -> list[bytes]:
    (folder / "made").mkdir()
    for path in make_store(folder / "made", random_proteins(range(30, 130, 10))).iterdir():
        path.rename(folder / path.name)
    return [(folder / "manifest.json").read_bytes()]


def made_manifest(folder: Path) -> list[bytes]:
    (folder / "mean.npy").write_bytes(b"x")
    return [json.dumps({"made_by": "embed", "files": {"mean.npy": "0" * 32}}).encode()]


READERS = {
    "PDB": Reader("in.pdb", structure(".pdb"), read_structure, may_be_gzip=True),
    "mmCIF": Reader("in.cif", structure(".cif"), read_structure, may_be_gzip=True),
    "BinaryCIF": Reader("in.bcif", structure(".bcif"), read_structure, may_be_gzip=True),
    "FASTA": Reader("in.fasta", contents(FASTA), lambda path: check([str(path)], IngestSection()), may_be_gzip=True),
    "OBO": Reader("in.obo", contents(OBO), read_ontology, may_be_gzip=True),
    "GAF": Reader("in.gaf", with_ontology(GAF), lambda path: read_annotations(path, ontology(path)), may_be_gzip=True),
    "annotations": Reader("in.tsv", with_ontology(TSV), lambda path: read_annotations(path, ontology(path))),
    "accretion": Reader("ia.tsv", with_ontology(b"GO:1\t0.5\nGO:2\t1\n"), lambda p: read_accretion(p, ontology(p))),
    "scores": Reader("in.tsv", with_ontology(SCORES), read_predictions),
    "CSV": Reader("in.csv", contents(b'text,label\nMKV,a\n"A;""C",b\n', b"text;label\nMKV;0,5\n"), read_table, True),
    "TSV": Reader("in.tsv", contents(b"text\tlabel\tx\nMKV\ta\t1\nACD\tb\t2\n"), read_table, may_be_gzip=True),
    "labelled CSV": Reader("in.csv", contents(b"text,label\nMKV,a\nACD,b\nMKL,a\n"), read_labels),
    "Parquet": Reader("in.parquet", parquet, read_table),
    "safetensors": Reader("in.safetensors", arrays, lambda path: [array.sum() for array in open_arrays(path).values()]),
    "npy": embeddings("mean.npy", "npy"),
    "HDF5": embeddings("mean.h5", "hdf5"),
    "embeddings.parquet": embeddings("mean.parquet", "parquet"),
    "index.parquet": embeddings("index.parquet", "npy"),
    "embeddings.json": embeddings("embeddings.json", "npy"),
    "trained.faiss": of_index("trained.faiss"),
    "lists of an index": of_index("parts/00001.lists"),
    "part of an index": of_index("parts/00001.safetensors"),
    "store manifest": Reader("manifest.json", store_manifest, lambda path: Store(path.parent, "full")),
    "esmeray.json": Reader("esmeray.json", made_manifest, lambda path: refuse_existing(path.parent, "embed", True)),
    "esmeray_model.json": Reader(
        "esmeray_model.json",
        contents(b'{"format_version": 1, "task": "classifier"}'),
        lambda path: task_of(path.parent),
    ),
    "config.json": Reader(
        "config.json",
        contents(b'{"model_type": "esm", "hidden_size": 8, "layers": [1, 2]}'),
        lambda path: read_settings(path, "model.backbone.source"),
    ),
    "YAML": Reader("in.yaml", contents(YAML, (SHIPPED / "esm2ae.yaml").read_bytes()[:1500]), load_config),
}
