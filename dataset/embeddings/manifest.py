"""A folder of embeddings: its manifest, and the index from the ids of the input to the sequences that were computed.

``embeddings.json``     what each output is, its files, and the job that it was made by
``index.parquet``       a row for each record, in input order: id, length, sequence (number of the distinct sequence)
``mean.parquet`` ...    one vector a record, in input order (.parquet, .npy, .h5)
``residues/*``          arrays of distinct sequences end to end, in order of their number (.safetensors), or .h5

Nothing here needs torch or Ray.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from common.errors import DataError, parsing
from common.publishing import inner_name, write_atomically, writing
from common.verification import verified

MANIFEST_FILE, INDEX_FILE = "embeddings.json", "index.parquet"
INDEX_ROWS = 65_536
REMEDY = "compute or copy the embeddings again"
_INDEX_TYPES = {"id": pa.string(), "length": pa.uint32(), "sequence": pa.int64(), "key": pa.string()}

Per: TypeAlias = Literal["protein", "residue", "pair"]
Dtype: TypeAlias = Literal["fp32", "fp16", "bf16", "int8"]
Name: TypeAlias = Annotated[str, AfterValidator(inner_name)]
"""Of a file or a folder within the folder."""


class OutputManifest(BaseModel):
    """One output of a model.

    Attributes:
        description: pooling, layer, and whether special tokens count.
        per: what has a row: a protein, each of its residues, or each pair of its residues.
        channels: values of a row.
        format: a name in :mod:`dataset.embeddings.formats.registry`.
        files: relative to the folder; of safetensors one for each shard.
        first_sequences: number of the first sequence of each shard.
        scales: of int8, by channel; shards have their own.
        columns: channels that each source has, of a joined output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    per: Per
    channels: PositiveInt
    dtype: Dtype
    format: str
    files: list[Name] = []
    first_sequences: list[int] = []
    scales: list[float] | None = None
    columns: dict[str, int] = {}


class EmbeddingsManifest(BaseModel):
    """``embeddings.json``; ``job`` describes what the folder was computed from and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["esmeray-embeddings"] = "esmeray-embeddings"
    format_version: Literal[1] = 1
    num_records: NonNegativeInt
    num_sequences: int
    outputs: dict[Name, OutputManifest] = Field(min_length=1)
    job: dict[str, Any] = {}


def read_manifest(folder: Path) -> EmbeddingsManifest:
    """The manifest of a folder. Raises DataError where there is none, or it can't be read."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DataError(f"{folder}: no embeddings there (no {MANIFEST_FILE}); give a folder made by embed")
    with parsing(path, REMEDY):
        return EmbeddingsManifest.model_validate_json(verified(path).read_bytes())


def write_manifest(folder: Path, manifest: EmbeddingsManifest) -> None:
    """Write the manifest, last of all files."""
    write_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")


class Index:
    """The index of a folder: N records in the order of the input."""

    def __init__(self, folder: Path, num_records: int) -> None:
        self.folder, self.num_records = folder, num_records

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
        return self.column("sequence").to_numpy()

    def column(self, name: str) -> Any:
        """(N,) a column, as Arrow has it. Raises DataError where the index is damaged or of other records."""
        path = verified(self.folder / INDEX_FILE)
        with parsing(path, REMEDY):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            # Before a column is decoded: of equal values a few bytes may stand for billions of rows.
            if file.metadata.num_rows != self.num_records or self.num_records > path.stat().st_size:
                raise ValueError(f"{file.metadata.num_rows:,} records, not {self.num_records:,}")
            column = file.read([name]).column(name)
            if column.type != _INDEX_TYPES[name] or column.null_count:
                raise ValueError(f"its column {name} is of another kind")
            return column


def write_index(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the index from parts of it, each with columns ``id``, ``length``, ``sequence``, maybe HDF5's ``key``."""
    writer = None
    with writing(folder / INDEX_FILE):
        for columns in rows:
            if writer is None:
                schema = pa.schema([(name, _INDEX_TYPES[name]) for name in columns])
                writer = pq.ParquetWriter(folder / INDEX_FILE, schema, write_page_checksum=True)
            writer.write_table(pa.table(columns, schema=writer.schema))
        if writer is not None:
            writer.close()


def parts(number: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, number)) for start in range(0, number, size))
