"""Files of an index: the manifest, and parts of consecutive rows. An extension adds parts.

``index.json``             kind, metric, identity of the vectors, and the parts
``parts/00000.safetensors`` a part: ``ids`` (concatenated UTF-8), ``id_offsets`` (n + 1,), ``id_hashes`` (n,) as
                           XXH3-64, ``sequences`` (n, 2) with the sequence keys of the embeddings, and the arrays of
                           the index kind
``parts/00000.lists``      compressed index: the part's lists in faiss' format
``parts/00000.*.blocks``   compressed index: checksums of each 64 kB block of these files
``trained.faiss``          compressed index: the clusters, without lists

Files are memory-mapped, and verified when they are first read (:mod:`esmeray.common.publishing`). Files with block
checksums are verified block by block, because a query reads few rows of a compressed index.

Shape legend: n rows of a part, C channels.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, PositiveInt

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import check_file, verified
from esmeray.dataset.embeddings.arrays import BLOCKS, open_arrays, open_checked
from esmeray.dataset.embeddings.manifest import Name
from esmeray.dataset.fasta.records import hashes_of
from esmeray.inference.index.metric import MAX_NORM, MetricName

Kind = Literal["exact", "compressed"]
Kinds: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of arrays by name."""

INDEX_FILE = "index.json"
TRAINED_FILE = "trained.faiss"
REMEDY = "build or copy the index again"
_BOUNDS = {
    **dict.fromkeys(("vectors", "centre"), (-MAX_NORM, MAX_NORM)),
    **dict.fromkeys(("radii", "residuals", "deviations"), (0.0, 2 * MAX_NORM)),
    "half_squares": (0.0, MAX_NORM**2),
}
"""Bounds of values in arrays. Beyond them products are infinite, and hits would be missed silently."""


class PartEntry(BaseModel, extra="forbid", frozen=True):
    """Number of rows of a part, its file name without suffix, and the XXH3-128 of its files.

    ``continues``: :meth:`IndexManifest.identity` of the index before this part; None in parts of earlier versions.
    """

    rows: PositiveInt
    name: Name = "memory"
    files: dict[Name, str] = {}
    continues: str | None = None

    def path(self, folder: Path, suffix: str) -> Path:
        """Path of the part's file with this suffix."""
        return folder / f"{self.name}{suffix}"


class SourceModel(BaseModel, extra="forbid", frozen=True):
    """The model that computed the vectors, and the settings of its job, which also apply to queries."""

    source: str
    random_weights: bool
    settings: dict[str, Any]


class IndexManifest(BaseModel, extra="forbid", frozen=True):
    """Contents of ``index.json``. ``made_of``: identity of model, layer and pooling, or None if it is unknown."""

    format: Literal["esmeray-index"] = "esmeray-index"
    format_version: Literal[1] = 1
    kind: Kind
    metric: MetricName
    output: str
    channels: PositiveInt
    made_of: str | None
    model: SourceModel | None
    parts: list[PartEntry]

    def identity(self) -> str:
        """Identity of model, kind and parts, hex."""
        described = [self.kind, self.metric, self.output, self.made_of, *(part.files for part in self.parts)]
        return xxhash.xxh3_128_hexdigest(json.dumps(described).encode())

    @property
    def count(self) -> int:
        return sum(part.rows for part in self.parts)

    def space(self, name: str) -> str | None:
        """Vector space, as in the manifest of embeddings; the only output of an index is ``name``."""
        return self.made_of


def read_index_manifest(folder: Path, source: Path | str | None = None) -> IndexManifest:
    """Read the manifest of a folder. Raises DataError if it is missing or can't be read."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError(
            f"{source or folder}: no index found (no {INDEX_FILE}); give a folder written by 'esmeray embed index'"
        )
    with parsing(path, REMEDY):
        manifest = IndexManifest.model_validate_json(verified(path).read_bytes())
        if not manifest.parts:
            raise ValueError("no parts")
    for number, part in enumerate(manifest.parts):
        before = manifest.model_copy(update={"parts": manifest.parts[:number]})
        if part.continues not in (None, before.identity()):
            raise DataError(f"{path}: its part {part.name} belongs to an index of other vectors; {REMEDY}")
    return manifest


def open_part(folder: Path, entry: PartEntry, kinds: Kinds, by_blocks: bool) -> dict[str, Any]:
    """Open the arrays of a part, verified as a whole or, with ``by_blocks``, block by block.

    Raises DataError if an array is missing, has another dtype or shape, or has invalid values. The checks don't rely on
    checksums only, because a faulty writer also writes the checksums.
    """
    path = entry.path(folder, ".safetensors")
    # Compared with the index's manifest, because a part copied from another index has valid checksums of its own.
    for name, checksum in entry.files.items():
        if not by_blocks or name.endswith(BLOCKS):
            check_file(folder / name, REMEDY, xxh128=checksum)
    arrays: dict[str, Any] = open_checked(path) if by_blocks else open_arrays(path)
    with parsing(path, REMEDY):
        # Earlier versions did not record the sequences.
        arrays.setdefault("sequences", np.broadcast_to(np.uint64(0), (entry.rows, 2)))
        kinds |= {
            "ids": ("int8", arrays["ids"].shape[:1]),
            "id_offsets": ("int64", (entry.rows + 1,)),
            "id_hashes": ("uint64", (entry.rows,)),
            "sequences": ("uint64", (entry.rows, 2)),
        }
        for name, kind in kinds.items():
            if (arrays[name].dtype, arrays[name].shape) != kind:
                raise ValueError(
                    f"{name}: expected {kind[0]} {kind[1]}, found {arrays[name].dtype} {arrays[name].shape}"
                )
        for name, (lowest, highest) in _BOUNDS.items():
            # Written so that NaN is rejected too.
            if name in kinds and not (lowest <= arrays[name][:].min() and arrays[name][:].max() <= highest):
                raise ValueError(f"{name}: contains NaN, or values out of range")
    return arrays


def id_arrays(blocks: Iterable[tuple[Sequence[str], NDArray[np.uint64]]]) -> dict[str, NDArray]:
    """Arrays stored for a part's ids and sequences. Input is in blocks, because Python strings would take gigabytes."""
    ids = bytearray()
    sizes = [np.zeros(1, np.int64)]
    hashes = [np.empty(0, np.uint64)]
    sequences = [np.empty((0, 2), np.uint64)]
    for block, sequences_n2 in blocks:
        texts = [record_id.encode() for record_id in block]
        ids += b"".join(texts)
        sizes.append(np.array([*map(len, texts)], np.int64))
        hashes.append(hashes_of(texts))
        sequences.append(sequences_n2)
    return {
        "ids": np.frombuffer(ids, np.int8),
        "id_offsets": np.concatenate(sizes).cumsum(),
        "id_hashes": np.concatenate(hashes),
        "sequences": np.concatenate(sequences),
    }
