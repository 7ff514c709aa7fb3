"""A folder of embeddings: its manifest, and the index from the ids of the input to the sequences that were computed.

``embeddings.json``     what each output is, its files, and the job that it was made by
``index.parquet``       a row for each record, in input order: id, length, sequence (number of the distinct sequence),
                        hash and second_hash (the key of its residues, as caches have it)
``training.npy``        hashes of the sequences to which the model was fitted, as its own folder has them, if it does
``mean.parquet`` ...    one vector a record, in input order (.parquet, .npy, .h5)
``residues/*``          arrays of distinct sequences end to end, in order of their number (.safetensors), or .h5
``part-00001/`` ...     what was added since, in folders like this one; a part is there once it has its manifest, which
                        names the manifest that it continues

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
from esmeray.common.publishing import MADE_FILE, PARTS, file_xxh128, inner_name, write_atomically, writing
from esmeray.common.remote import current, local_path, open_ranges, uri_of
from esmeray.common.verification import verified
from esmeray.run_folder.job import differences

MANIFEST_FILE, INDEX_FILE = "embeddings.json", "index.parquet"
INDEX_ROWS = 65_536
TRAINING_FILE = "training.npy"
"""(L,) uint64, XXH3-64 of the sequences to which a model was fitted: of a model, of embeddings, and of an index."""
_ALWAYS_FETCHED = (MANIFEST_FILE, INDEX_FILE, TRAINING_FILE, MADE_FILE)
"""Files of a folder at a URI that are copied whole: the others are read by them, and are many times as large."""
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
"""Key of a part's job: XXH3-128 of the manifest before it."""

Per: TypeAlias = Literal["protein", "residue", "pair"]
Dtype: TypeAlias = Literal["fp32", "fp16", "bf16", "int8"]
Name: TypeAlias = Annotated[str, AfterValidator(inner_name)]
"""Of a file or a folder within the folder."""


class OutputManifest(BaseModel, extra="forbid", frozen=True):
    """One output of a model.

    Attributes:
        description: pooling, layer, and whether special tokens count.
        per: what has a row: a protein, each of its residues, or each pair of its residues.
        channels: values of a row.
        format: a name in :mod:`esmeray.dataset.embeddings.formats.registry`.
        files: relative to the folder; of safetensors one for each shard.
        first_sequences: number of the first sequence of each shard.
        scales: of int8, by channel; shards have their own.
        columns: channels that each source has, of a joined output.
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
    """``embeddings.json``; ``job`` describes what the folder was computed from and how."""

    format: Literal["esmeray-embeddings"] = "esmeray-embeddings"
    format_version: Literal[1] = 1
    num_records: NonNegativeInt
    num_sequences: int
    outputs: dict[Name, OutputManifest] = Field(min_length=1)
    job: dict[str, Any] = {}

    def space(self, name: str) -> str | None:
        """Identity of what an output's channels mean: model, pooling, layer; None where the maker left no fingerprint.

        Of a joined output, of each part in turn. Precision, cropping and the device are left out: vectors differ by
        these as those of two proteins do, in value and not in meaning.
        """
        # By what made them and not by the folder: the same job elsewhere gives vectors that can be compared.
        models, sources = _parts_of(self.job)
        if None in models:
            return None
        description = self.outputs[name].description
        for source in sources:  # folders, which mean nothing
            description = description.replace(f"{source}: ", "")
        return space_of(" | ".join(map(str, models)), description)


def space_of(models: str, description: str) -> str:
    """See :meth:`EmbeddingsManifest.space`."""
    return f"{models} ({description})"


def _parts_of(job: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Fingerprints of the models of a job, and names of what was joined in it, those within those included."""
    if "joined" not in job:
        return [job.get("model")], []
    models: list[Any] = []
    names: list[str] = []
    for name, source in job["joined"].items():
        inner_models, inner_names = _parts_of(source)
        models += inner_models
        names += [name, *inner_names]
    return models, names


def read_manifest(folder: Path) -> EmbeddingsManifest:
    """The manifest of a folder. Raises DataError where there is none, or it can't be read."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DataError(f"{folder}: no embeddings there (no {MANIFEST_FILE}); give a folder made by embed")
    with parsing(path, REMEDY):
        return EmbeddingsManifest.model_validate_json(verified(path).read_bytes())


def write_manifest(folder: Path, manifest: EmbeddingsManifest) -> None:
    """Write the manifest, last of all files: a folder without it is none of embeddings."""
    write_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")


def part_name(number: int) -> str:
    """Folder of the part by which an output grew for the ``number``-th time, from 1."""
    return f"part-{number:05d}"


def part_folders(folder: Path) -> list[Path]:
    """A folder of embeddings and its parts, in the order in which they were added; DataError where one is missing."""
    # By the manifest: at a URI it is the last file of a part to come.
    parts = sorted(path.parent for path in folder.glob(f"{PARTS}/{MANIFEST_FILE}"))
    for number, part in enumerate(parts, 1):
        if part.name != part_name(number):
            raise DataError(f"{folder}: damaged: {part_name(number)} is missing before {part.name}; {REMEDY}")
    return [folder, *parts]


class Part:
    """The index of one folder: N records in the order of the input, as a format reads it.

    ``uri`` is that of a folder of which here are the manifests and the index alone.
    """

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self.folder = folder
        self.uri = uri
        self.manifest = read_manifest(folder)
        self.num_records = self.manifest.num_records

    def where(self, name: str) -> Path | str:
        """Path or URI of a file, for messages."""
        return self.folder / name if self.uri is None else f"{self.uri}/{name}"

    def open(self, name: str, cache: str = "readahead") -> Path | BinaryIO:
        """A file's path, verified; of one at a URI a file, of which what is read is fetched (``cache``: fsspec's)."""
        return verified(self.folder / name) if self.uri is None else open_ranges(f"{self.uri}/{name}", cache)

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """(N,) number of each record's distinct sequence in this folder."""
        return self.column("sequence").to_numpy()

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """(N,) a column, as Arrow has it, or (n,) of the records from ``start`` up to ``stop``.

        Raises DataError where the index is damaged or of other records.
        """
        path = verified(self.folder / INDEX_FILE)
        with parsing(path, REMEDY):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            # Before a column is decoded: of equal values a few bytes may stand for billions of rows.
            if file.metadata.num_rows != self.num_records or self.num_records > path.stat().st_size:
                raise ValueError(f"{file.metadata.num_rows:,} records, not {self.num_records:,}")
            # Row groups that hold some of them: ids of all records may be more than memory has.
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            bounds = np.cumsum([0, *sizes])
            first = max(0, int(bounds.searchsorted(start, side="right")) - 1)
            last = int(bounds.searchsorted(self.num_records if stop is None else stop))
            # Earlier versions wrote one hash, another program maybe none: zeros are not compared.
            if name in ("hash", "second_hash") and name not in file.schema_arrow.names:
                return pa.chunked_array([np.zeros((self.num_records if stop is None else stop) - start, np.uint64)])
            column = file.read_row_groups([*range(first, last)], [name]).column(name)
            column = column.slice(start - int(bounds[first]), None if stop is None else stop - start)
            if column.type != _INDEX_TYPES[name] or column.null_count:
                raise ValueError(f"its column {name} is of another kind")
            return column


class Index:
    """The index of a folder with all of its parts: N records in the order in which they were added.

    Attributes:
        source: the folder, or its URI.
        folder: with the manifests and the index, of a URI a copy of these.
        manifest: of the folder without its parts, which were made in the same way.
    """

    def __init__(self, source: Path | str) -> None:
        """Open a folder or a URI, as it is now. Raises DataError where there are no embeddings, or damaged ones."""
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
        """(N,) the ids."""
        return self.column("id").to_pylist()

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """(N,) residues of each record."""
        return self.column("length").to_numpy()

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """(N,) number of each record's distinct sequence: equal sequences have the same."""
        if len(self.parts) == 1:
            return self.parts[0].sequences
        # Each part counts its own from 0.
        return np.unique(self.sequence_keys, axis=0, return_inverse=True)[1].reshape(-1)

    def refuse_other_sequences(
        self,
        numbers_n: NDArray[np.integer],
        keys_n2: NDArray[np.uint64],
        where: object,
        remedy: str = "embed the same sequences",
    ) -> None:
        """Raise DataError where a record of a number has another sequence here than ``where``, under the same id."""
        is_other_n = differ(self.sequence_keys[numbers_n], keys_n2)
        if is_other_n.any():
            name = self.ids[int(numbers_n[is_other_n.argmax()])]
            raise DataError(f"{self.source}: {name!r} is another sequence than in {where}; {remedy}")

    @cached_property
    def sequence_keys(self) -> NDArray[np.uint64]:
        """(N, 2) key of each record's sequence; a second hash of 0 was not recorded."""
        return self.sequence_keys_of(0, self.num_records)

    def sequence_keys_of(self, start: int, stop: int) -> NDArray[np.uint64]:
        """(n, 2) of the records from ``start`` up to ``stop``."""
        return np.column_stack([self.column(name, start, stop).to_numpy() for name in ("hash", "second_hash")])

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """(N,) a column, as Arrow has it, or (n,) of the records from ``start`` up to ``stop``.

        Raises DataError where an index is damaged or of other records.
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
    """(n,) whether sequences differ by their keys; what one side did not record is not compared."""
    is_recorded_n2 = np.logical_and(ours_n2, theirs_n2)
    return ((ours_n2 != theirs_n2) & is_recorded_n2).any(axis=1)


def _refuse_foreign(part: Part, before: Part, first: EmbeddingsManifest) -> None:
    """Raise DataError for a part that does not continue the folder or the part before it, as one of another output."""
    job = part.manifest.job
    # Keys that a maker left out, as versions before did, say nothing.
    wanted = {**first.job, CONTINUES: file_xxh128(before.folder / MANIFEST_FILE)}
    names = {"model", "settings", CONTINUES} & wanted.keys() & job.keys()
    changes = differences(job, {name: wanted[name] for name in sorted(names)})
    ours, theirs = ({name: output.description for name, output in of.outputs.items()} for of in (first, part.manifest))
    changes += differences(theirs, ours)
    if changes:
        raise DataError(
            f"{part.where('')}: is no part of this output ({changes[0]}); remove it, or compute the embeddings again"
        )


def training_hashes(folder: Path) -> NDArray[np.uint64] | None:
    """(L,) XXH3-64 of the sequences to which a model was fitted, of a folder that has them; else None."""
    path = folder / TRAINING_FILE
    if not path.is_file():
        return None
    with parsing(path, REMEDY):
        hashes_L: NDArray[np.uint64] = np.load(verified(path))
    return hashes_L


def write_training(folder: Path, sources: Iterable[Any]) -> None:
    """Write the hashes of all that a model of ``sources`` was fitted to, which have a ``folder``, if it is recorded."""
    every_training = [training_hashes(source.folder) for source in sources]
    # One fitted model is enough to have seen a protein.
    recorded = [hashes_L for hashes_L in every_training if hashes_L is not None]
    if recorded:
        np.save(folder / TRAINING_FILE, np.unique(np.concatenate(recorded)))


def write_index(folder: Path, rows: Iterable[dict[str, Any]], has_keys: bool = False) -> None:
    """Write the index from parts of it: columns ``id``, ``length``, ``sequence`` and hashes, maybe HDF5's ``key``."""
    schema = pa.schema([(name, kind) for name, kind in _INDEX_TYPES.items() if has_keys or name != "key"])
    path = folder / INDEX_FILE
    with writing(path), pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for columns in rows:
            writer.write_table(pa.table(columns, schema=schema))


def ranges(number: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, number)) for start in range(0, number, size))
