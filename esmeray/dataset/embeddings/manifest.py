"""Folder of embeddings: its manifest, and the index from the input's ids to the computed sequences.

``embeddings.json``     description and files of each output, and the job that made them
``index.parquet``       a row per record, in input order: id, length, sequence (number of the distinct sequence),
                        hash and second_hash (the key of the sequence, as caches have it)
``training.npy``        hashes of the sequences that the model was fitted to, if the model's folder has them
``mean.parquet`` ...    one vector per record, in input order (.parquet, .npy, .h5)
``residues/*``          arrays of distinct sequences, concatenated in order of their number (.safetensors), or .h5
``part-00001/`` ...     records added later, in folders like this one; a part is complete once it has its manifest,
                        which names the manifest that it continues

Nothing here needs torch or Ray.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, PositiveInt

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import MADE_FILE, PARTS, file_xxh128, inner_name, verified, write_atomically, writing
from esmeray.common.remote import current, local_path, open_ranges, uri_of
from esmeray.run_folder.job import differences

MANIFEST_FILE, INDEX_FILE = "embeddings.json", "index.parquet"
INDEX_ROWS = 65_536
TRAINING_FILE = "training.npy"
"""(L,) uint64, XXH3-64 of the sequences that a model was fitted to. Models, embeddings and indexes have this file."""
_ALWAYS_FETCHED = (MANIFEST_FILE, INDEX_FILE, TRAINING_FILE, MADE_FILE)
"""Files that are copied whole from a folder at a URI. They are needed to read the other files, which are far larger."""
REMEDY = "compute or copy the embeddings again"
_INDEX_TYPES = {
    "id": pa.string(),
    "length": pa.uint32(),
    "sequence": pa.int64(),
    "key": pa.string(),
    "hash": pa.uint64(),
    "second_hash": pa.uint64(),
}
CONTINUES = "continues"
"""Key in a part's job: XXH3-128 of the manifest that the part continues."""

Per: TypeAlias = Literal["protein", "residue", "pair"]
Dtype: TypeAlias = Literal["fp32", "fp16", "bf16", "int8"]
Name: TypeAlias = Annotated[str, AfterValidator(inner_name)]
"""Name of a file or a folder within the folder of embeddings."""


class OutputManifest(BaseModel, extra="forbid", frozen=True):
    """One output of a model.

    Attributes:
        description: pooling, layer, and whether special tokens count.
        per: unit of a row: a protein, a residue, or a pair of residues.
        channels: number of values per row.
        format: a name in :mod:`esmeray.dataset.embeddings.formats.registry`.
        files: paths relative to the folder; for safetensors, one per shard.
        first_sequences: number of the first sequence in each shard.
        scales: int8 scale per channel; shards have their own.
        columns: number of channels per source, for a joined output.
    """

    description: str
    per: Per
    channels: PositiveInt
    dtype: Dtype
    format: str
    files: list[Name] = []
    first_sequences: list[int] = []
    scales: list[float] | None = None
    columns: dict[str, int] = {}


class EmbeddingsManifest(BaseModel, extra="forbid", frozen=True):
    """Content of ``embeddings.json``. ``job`` describes what the folder was computed from and how."""

    format: Literal["esmeray-embeddings"] = "esmeray-embeddings"
    format_version: Literal[1] = 1
    num_records: NonNegativeInt
    num_sequences: int
    outputs: dict[Name, OutputManifest] = Field(min_length=1)
    job: dict[str, Any] = {}

    def space(self, name: str) -> str | None:
        """Return an identity of what an output's channels mean: model, pooling, layer. None without a fingerprint.

        A joined output has the identities of its sources, in order. Precision, cropping and device are left out: they
        change the values of vectors, not their meaning.
        """
        # Identified by the job, not by the folder: the same job elsewhere gives comparable vectors.
        models, sources = _parts_of(self.job)
        if None in models:
            return None
        description = self.outputs[name].description
        for source in sources:  # folder names, which carry no meaning
            description = description.replace(f"{source}: ", "")
        return space_of(" | ".join(map(str, models)), description)


def space_of(models: str, description: str) -> str:
    """Combine models and description to an identity; see :meth:`EmbeddingsManifest.space`."""
    return f"{models} ({description})"


def _parts_of(job: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the models' fingerprints of a job, and the names of joined sources, nested ones included."""
    if "joined" not in job:
        return [job.get("model")], []
    models: list[Any] = []
    names: list[str] = []
    for name, source in job["joined"].items():
        inner_models, inner_names = _parts_of(source)
        models += inner_models
        names += [name, *inner_names]
    return models, names


def read_manifest(folder: Path, source: Path | str | None = None) -> EmbeddingsManifest:
    """Read a folder's manifest. Raises DataError if it is missing or unreadable."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DataError(
            f"{source or folder}: no embeddings found (no {MANIFEST_FILE}); give a folder written by 'esmeray embed'"
        )
    with parsing(path, REMEDY):
        return EmbeddingsManifest.model_validate_json(verified(path).read_bytes())


def write_manifest(folder: Path, manifest: EmbeddingsManifest) -> None:
    """Write the manifest, after all other files: a folder without it does not count as embeddings."""
    write_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")


def part_name(number: int) -> str:
    """Return the folder name of the ``number``-th part that was added, from 1."""
    return f"part-{number:05d}"


def part_folders(folder: Path) -> list[Path]:
    """Return a folder of embeddings and its parts in the order of addition. Raises DataError if a part is missing."""
    # A part counts once it has its manifest, which is the last file to arrive at a URI.
    parts = sorted(path.parent for path in folder.glob(f"{PARTS}/{MANIFEST_FILE}"))
    for number, part in enumerate(parts, 1):
        if part.name != part_name(number):
            raise DataError(f"{folder}: damaged: {part_name(number)} is missing before {part.name}; {REMEDY}")
    return [folder, *parts]


class Part:
    """The index of one folder, without its parts: N records in input order.

    ``uri`` is the location of the full folder if ``folder`` holds only copies of the manifests and the index.
    """

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self.folder = folder
        self.uri = uri
        self.manifest = read_manifest(folder, uri)
        self.num_records = self.manifest.num_records

    def where(self, name: str) -> Path | str:
        """Return path or URI of a file, for messages."""
        return self.folder / name if self.uri is None else f"{self.uri}/{name}"

    def open(self, name: str, cache: str = "readahead") -> Path | BinaryIO:
        """Return a file's verified path. At a URI, return a file object that fetches the parts that are read.

        ``cache`` is fsspec's cache type.
        """
        return verified(self.folder / name) if self.uri is None else open_ranges(f"{self.uri}/{name}", cache)

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """(N,) number of each record's distinct sequence in this folder."""
        return self.column("sequence").to_numpy()

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Return a column as an Arrow array, (N,), or (n,) for the records from ``start`` to before ``stop``.

        Raises DataError if the index is damaged or belongs to other records.
        """
        path = verified(self.folder / INDEX_FILE)
        end = self.num_records if stop is None else stop
        with parsing(path, REMEDY):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            # Before decoding: a few bytes may stand for billions of equal values.
            if file.metadata.num_rows != self.num_records or self.num_records > path.stat().st_size:
                raise ValueError(
                    f"it has {file.metadata.num_rows:,} records, but the manifest says {self.num_records:,}"
                )
            # Read only the row groups with these records, because the ids of all records may not fit into memory.
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            bounds = np.cumsum([0, *sizes])
            first = max(0, int(bounds.searchsorted(start, side="right")) - 1)
            last = int(bounds.searchsorted(end))
            # Earlier versions wrote one hash, other programs maybe none. Zeros are not compared.
            if name in ("hash", "second_hash") and name not in file.schema_arrow.names:
                return pa.chunked_array([np.zeros(end - start, np.uint64)])
            column = file.read_row_groups([*range(first, last)], [name]).column(name)
            column = column.slice(start - int(bounds[first]), end - start)
            if column.type != _INDEX_TYPES[name] or column.null_count:
                raise ValueError(f"its column {name} has an unexpected type")
            return column


class Index:
    """The index of a folder with all of its parts: N records in the order of addition.

    Attributes:
        source: the folder, or its URI.
        folder: the folder; for a URI, a copy of the manifests and the index.
        manifest: the manifest of the folder itself; its parts were made in the same way.
    """

    def __init__(self, source: Path | str) -> None:
        """Open the current state of a folder or a URI. Raises DataError if embeddings are missing or damaged."""
        uri = uri_of(source)
        self.folder = local_path(source, lambda name: PurePath(name).name in _ALWAYS_FETCHED)
        self.source = uri or self.folder
        folders = part_folders(self.folder)
        base = uri and current(uri)
        self.parts = [Part(path, base and "/".join([base, *path.relative_to(self.folder).parts])) for path in folders]
        self.manifest = self.parts[0].manifest
        for before, part in pairwise(self.parts):
            _refuse_foreign(part, before, self.manifest)
        self.num_records = sum(part.num_records for part in self.parts)

    @cached_property
    def ids(self) -> list[str]:
        """(N,) ids of the records."""
        return self.column("id").to_pylist()

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """(N,) number of residues of each record."""
        return self.column("length").to_numpy()

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """(N,) number of each record's distinct sequence; equal sequences have equal numbers."""
        if len(self.parts) == 1:
            return self.parts[0].sequences
        # Each part numbers its own sequences from 0.
        return np.unique(self.sequence_keys, axis=0, return_inverse=True)[1].reshape(-1)

    def refuse_other_sequences(
        self,
        numbers_n: NDArray[np.integer],
        keys_n2: NDArray[np.uint64],
        where: object,
        remedy: str = "embed the same sequences",
    ) -> None:
        """Raise DataError if a record with the same id has another sequence in ``where`` (for the message).

        ``numbers_n`` are the records here, ``keys_n2`` the keys of their sequences there.
        """
        is_other_n = differ(self.sequence_keys[numbers_n], keys_n2)
        if is_other_n.any():
            name = self.ids[int(numbers_n[is_other_n.argmax()])]
            raise DataError(f"{self.source}: {name!r} has a different sequence in {where}; {remedy}")

    @cached_property
    def sequence_keys(self) -> NDArray[np.uint64]:
        """(N, 2) key of each record's sequence; a second hash of 0 means that it was not recorded."""
        return self.sequence_keys_of(0, self.num_records)

    def sequence_keys_of(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Return the (n, 2) keys of the records from ``start`` to before ``stop``."""
        return np.column_stack([self.column(name, start, stop).to_numpy() for name in ("hash", "second_hash")])

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Return a column as an Arrow array, (N,), or (n,) for the records from ``start`` to before ``stop``.

        Raises DataError if an index is damaged or belongs to other records.
        """
        end = self.num_records if stop is None else stop
        chunks = []
        first = 0
        for part in self.parts:
            if start < first + part.num_records and first < end:
                rows = max(start - first, 0), min(end - first, part.num_records)
                chunks += part.column(name, *rows).chunks
            first += part.num_records
        return pa.chunked_array(chunks, _INDEX_TYPES[name])


def differ(ours_n2: NDArray[np.uint64], theirs_n2: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return (n,) bool, True if the keys of two sequences differ. A hash of 0 was not recorded and is not compared."""
    return ((ours_n2 != theirs_n2) & (ours_n2 != 0) & (theirs_n2 != 0)).any(axis=1)


def _refuse_foreign(part: Part, before: Part, first: EmbeddingsManifest) -> None:
    """Raise DataError if a part does not continue the previous one, e.g. a part of another output."""
    job = part.manifest.job
    # Skip keys that are missing on one side, as in earlier versions.
    wanted = {**first.job, CONTINUES: file_xxh128(before.folder / MANIFEST_FILE)}
    names = {"model", "settings", CONTINUES} & wanted.keys() & job.keys()
    changes = differences(job, {name: wanted[name] for name in sorted(names)})
    ours, theirs = ({name: output.description for name, output in of.outputs.items()} for of in (first, part.manifest))
    changes += differences(theirs, ours)
    if changes:
        raise DataError(
            f"{part.where('')}: does not belong to this output ({changes[0]}); remove it, or compute the "
            "embeddings again"
        )


def training_hashes(folder: Path) -> NDArray[np.uint64] | None:
    """Return (L,) XXH3-64 of the sequences that a model was fitted to, or None if the folder does not have them."""
    path = folder / TRAINING_FILE
    if not path.is_file():
        return None
    with parsing(path, REMEDY):
        hashes_L: NDArray[np.uint64] = np.load(verified(path))
    return hashes_L


def write_training(folder: Path, sources: Iterable[Any]) -> None:
    """Write the hashes of all sequences that the models of ``sources`` were fitted to, if any are recorded.

    Each source has an attribute ``folder``.
    """
    every_training = [training_hashes(source.folder) for source in sources]
    # A protein counts as seen if at least one of the models was fitted to it.
    recorded = [hashes_L for hashes_L in every_training if hashes_L is not None]
    if recorded:
        np.save(folder / TRAINING_FILE, np.unique(np.concatenate(recorded)))


def write_index(folder: Path, rows: Iterable[dict[str, Any]], has_keys: bool = False) -> None:
    """Write the index from blocks of columns ``id``, ``length``, ``sequence``, the hashes and, for HDF5, ``key``."""
    schema = pa.schema([(name, kind) for name, kind in _INDEX_TYPES.items() if has_keys or name != "key"])
    path = folder / INDEX_FILE
    with writing(path), pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for columns in rows:
            writer.write_table(pa.table(columns, schema=schema))


def ranges(number: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, number)) for start in range(0, number, size))
