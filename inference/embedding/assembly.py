"""The final files of a job from its shards: the same whatever was interrupted on the way.

In: shards, complete. Out: in the folder to publish, one file for each output of proteins, in the order of the input;
the shards themselves, by hard link, for outputs of residues; or HDF5 of either; the index; the manifest, last.

Shape legend: N records, n of a part of them, C channels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.publishing import writing
from dataset.embeddings.arrays import as_float32, open_arrays, scales_of
from dataset.embeddings.format import (
    INDEX_ROWS,
    EmbeddingsManifest,
    FileFormat,
    OutputManifest,
    parts,
    write_index,
    write_manifest,
)
from dataset.embeddings.tables import (
    NUMPY_DTYPES,
    SUFFIXES,
    Block,
    biotrainer_key,
    block_rows,
    hdf5_key,
    refuse_equal_keys,
    write_datasets,
    write_table,
)
from dataset.store.reader import Store
from inference.embedding.plan import Plan
from inference.embedding.settings import EmbeddingSettings, Output, file_format
from inference.embedding.shard_files import ShardFiles


class Assembly:
    """Writes the files of a model's embeddings to the folder ``building``."""

    def __init__(
        self, building: Path, plan: Plan, store: Store, shards: ShardFiles, settings: EmbeddingSettings
    ) -> None:
        self._building, self._plan, self._store = building, plan, store
        self._shards, self._settings = shards, settings
        self._open = lru_cache(maxsize=1024)(lambda output, number: open_arrays(shards.path(output, number)))

    def write(self, outputs: tuple[Output, ...], job: dict[str, Any], show: Callable[[str], None]) -> None:
        """Write all files. Raises ResourceError where the disk is full, DataError for ids that HDF5 can't hold."""
        if self._settings.format == "hdf5" and self._settings.hdf5_key == "id":
            refuse_equal_keys(self._store.id(record) for record in range(len(self._store)))
        write = {"safetensors": self._linked, "hdf5": self._datasets, "parquet": self._table, "npy": self._table}
        made = {}
        for output in outputs:
            show(f"writing {output.name}")
            made[output.name] = write[file_format(self._settings, output)](output)
        show("writing the index")
        records = len(self._store)
        write_index(self._building, (self._index_part(*part) for part in parts(records, INDEX_ROWS)))
        manifest = EmbeddingsManifest(
            num_records=records, num_sequences=self._plan.num_sequences, outputs=made, job=job
        )
        write_manifest(self._building, manifest)

    def _table(self, output: Output) -> OutputManifest:
        settings, store = self._settings, self._store
        name = output.name + SUFFIXES[settings.format]
        scales = None
        if settings.dtype == "int8":
            largest = [np.abs(self._open(output.name, n)["values"]).max(axis=0) for n in range(self._plan.num_shards)]
            scales = scales_of(np.max(largest, axis=0))

        def blocks() -> Iterator[Block]:
            for start, stop in parts(len(store), block_rows(output.channels, settings.dtype)):
                ids = [store.id(record) for record in range(start, stop)]
                yield Block(ids, store.lengths[start:stop], self._of_proteins(output, start, stop))

        shape = len(store), output.channels
        write_table(self._building / name, settings.format, blocks(), shape, settings.dtype, scales)
        return self._manifest(output, settings.format, [name], scales=None if scales is None else scales.tolist())

    def _linked(self, output: Output) -> OutputManifest:
        """The shards as they are."""
        paths = [self._shards.path(output.name, number) for number in range(self._plan.num_shards)]
        folder = self._building / output.name
        with writing(self._building):
            folder.mkdir()
            for path in paths:
                try:
                    os.link(path, folder / path.name)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, folder / path.name)
        names = [f"{output.name}/{path.name}" for path in paths]
        return self._manifest(output, "safetensors", names, first_sequences=self._plan.bounds[:-1].tolist())

    def _datasets(self, output: Output) -> OutputManifest:
        """A dataset for each record: (C,), (residues, C) or (residues, residues)."""
        shapes = {"protein": lambda length: (-1,), "residue": lambda length: (length, -1)}
        shape = shapes.get(output.per, lambda length: (length, length))

        def datasets() -> Iterator[tuple[str, str, NDArray]]:
            for record in range(len(self._store)):
                values, sequence = self._of_record(output, record), self._plan.sequences[record]
                shaped = values.reshape(shape(int(self._plan.lengths[sequence])))
                yield self._key(record), self._store.id(record), shaped.astype(NUMPY_DTYPES[self._settings.dtype])

        name = f"{output.name}.h5"
        write_datasets(self._building / name, datasets())
        return self._manifest(output, "hdf5", [name])

    def _of_proteins(self, output: Output, start: int, stop: int) -> NDArray[np.float32]:
        """(n, C) fp32 of records ``start`` to ``stop``."""
        sequences_n, bounds = self._plan.sequences[start:stop], self._plan.bounds
        shards_n = bounds.searchsorted(sequences_n, side="right") - 1
        rows_nC = np.empty((stop - start, output.channels), dtype=np.float32)
        for number in np.unique(shards_n).tolist():
            chosen = shards_n == number
            rows_nC[chosen] = self._open(output.name, number)["values"][sequences_n[chosen] - bounds[number]]
        return rows_nC

    def _of_record(self, output: Output, record: int) -> NDArray[np.float32]:
        """(rows, C) fp32 of one record."""
        sequence, bounds = int(self._plan.sequences[record]), self._plan.bounds
        number = int(bounds.searchsorted(sequence, side="right")) - 1
        arrays, place = self._open(output.name, number), sequence - int(bounds[number])
        start, stop = arrays["offsets"][place : place + 2]
        return as_float32(arrays["values"][start:stop])

    def _manifest(self, output: Output, kind: FileFormat, files: list[str], **more: Any) -> OutputManifest:
        about = {"description": output.description, "per": output.per, "channels": output.channels}
        return OutputManifest(**about, dtype=self._settings.dtype, format=kind, files=files, **more)

    def _index_part(self, start: int, stop: int) -> dict[str, Any]:
        records = range(start, stop)
        part = {
            "id": [self._store.id(record) for record in records],
            "length": self._store.lengths[start:stop],
            "sequence": self._plan.sequences[start:stop],
        }
        if self._settings.format == "hdf5":
            part["key"] = [self._key(record) for record in records]
        return part

    def _key(self, record: int) -> str:
        """Name of a record's dataset in HDF5."""
        if self._settings.hdf5_key == "id":
            return hdf5_key(self._store.id(record))
        return biotrainer_key(self._store.text(record))
