"""The final files of a job from its shards: the same whatever was interrupted on the way.

In: shards, complete. Out: in the folder to publish, one file for each output of proteins, in the order of the input;
the shards themselves, by hard link, for outputs of residues; the index; the manifest, last.

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
    OutputManifest,
    parts,
    write_index,
    write_manifest,
)
from dataset.embeddings.tables import (
    NUMPY_DTYPES,
    SUFFIXES,
    Block,
    add_dataset,
    biotrainer_key,
    block_rows,
    hdf5_key,
    refuse_equal_keys,
    write_table,
)
from dataset.store.reader import Store
from inference.embedding.plan import Plan
from inference.embedding.settings import EmbeddingSettings, ModelFacts, Output, file_format
from inference.embedding.shard_files import ShardFiles

Progress = Callable[[str], None]


def assemble(
    building: Path,
    facts: ModelFacts,
    plan: Plan,
    store: Store,
    shards: ShardFiles,
    settings: EmbeddingSettings,
    job: dict[str, Any],
    show: Progress = lambda text: None,
) -> None:
    """Write all files of a model's embeddings to ``building``. Raises ResourceError where the disk is full."""
    keys: Callable[[int], str] | None = None
    if settings.format == "hdf5":
        if settings.hdf5_key == "id":
            refuse_equal_keys(store.id(record) for record in range(len(store)))
        keys = _by_id(store) if settings.hdf5_key == "id" else _by_hash(store)
    outputs = {}
    for output in facts.outputs:
        show(f"writing {output.name}")
        rows = _Rows(output, plan, shards)
        if file_format(settings, output) == "safetensors":
            outputs[output.name] = _linked(building, output, plan, shards, settings)
        elif output.per == "protein":
            outputs[output.name] = _table(building, output, rows, plan, store, settings, keys)
        else:
            assert keys is not None
            outputs[output.name] = _datasets(building, output, rows, store, settings, keys)
    show("writing the index")
    write_index(
        building, (_index_part(start, stop, plan, store, keys) for start, stop in parts(len(store), INDEX_ROWS))
    )
    write_manifest(
        building,
        EmbeddingsManifest(num_records=len(store), num_sequences=plan.num_sequences, outputs=outputs, job=job),
    )


class _Rows:
    """Rows of records out of the shards of one output."""

    def __init__(self, output: Output, plan: Plan, shards: ShardFiles) -> None:
        self._plan = plan
        self._open = lru_cache(maxsize=1024)(lambda number: open_arrays(shards.path(output.name, number)))

    def of_proteins(self, start: int, stop: int) -> NDArray[np.float32]:
        """(n, C) fp32 of records ``start`` to ``stop``."""
        sequences_n = self._plan.sequences[start:stop]
        shards_n = self._plan.bounds.searchsorted(sequences_n, side="right") - 1
        rows_nC: NDArray[np.float32] | None = None
        for number in np.unique(shards_n).tolist():
            values = self._open(number)["values"]
            if rows_nC is None:
                rows_nC = np.empty((stop - start, values.shape[1]), dtype=np.float32)
            chosen = shards_n == number
            rows_nC[chosen] = values[sequences_n[chosen] - self._plan.bounds[number]]
        assert rows_nC is not None
        return rows_nC

    def of_record(self, record: int) -> NDArray[np.float32]:
        """(rows, C) fp32 of one record."""
        sequence = int(self._plan.sequences[record])
        number = int(self._plan.bounds.searchsorted(sequence, side="right")) - 1
        arrays, place = self._open(number), sequence - int(self._plan.bounds[number])
        start, stop = arrays["offsets"][place : place + 2]
        return as_float32(arrays["values"][start:stop])

    def scales(self) -> NDArray[np.float32]:
        """(C,) fp32: scale of each channel over all proteins."""
        largest = [np.abs(self._open(number)["values"]).max(axis=0) for number in range(self._plan.num_shards)]
        return scales_of(np.max(largest, axis=0))


def _table(
    building: Path,
    output: Output,
    rows: _Rows,
    plan: Plan,
    store: Store,
    settings: EmbeddingSettings,
    keys: Callable[[int], str] | None,
) -> OutputManifest:
    name = output.name + SUFFIXES[settings.format]
    scales = rows.scales() if settings.dtype == "int8" else None

    def blocks() -> Iterator[Block]:
        for start, stop in parts(len(store), block_rows(output.channels, settings.dtype)):
            ids = [store.id(record) for record in range(start, stop)]
            yield Block(ids, store.lengths[start:stop], rows.of_proteins(start, stop))

    shape = len(store), output.channels
    names = () if keys is None else map(keys, range(len(store)))
    write_table(building / name, settings.format, blocks(), shape, settings.dtype, scales, names)
    return _manifest(output, settings, [name], scales=None if scales is None else scales.tolist())


def _linked(
    building: Path, output: Output, plan: Plan, shards: ShardFiles, settings: EmbeddingSettings
) -> OutputManifest:
    """The shards as they are."""
    names = [f"{output.name}/{shards.path(output.name, number).name}" for number in range(plan.num_shards)]
    with writing(building):
        (building / output.name).mkdir()
        for number, name in enumerate(names):
            try:
                os.link(shards.path(output.name, number), building / name)
            except OSError:  # a file system without hard links
                shutil.copyfile(shards.path(output.name, number), building / name)
    first = plan.bounds[:-1].tolist()
    return _manifest(output, settings, names, format="safetensors", first_sequences=first)


def _datasets(
    building: Path,
    output: Output,
    rows: _Rows,
    store: Store,
    settings: EmbeddingSettings,
    keys: Callable[[int], str],
) -> OutputManifest:
    """A dataset for each record: (residues, C), or (residues, residues)."""
    import h5py

    name = f"{output.name}.h5"
    with writing(building / name), h5py.File(building / name, "w") as file:
        for record in range(len(store)):
            values = rows.of_record(record).astype(NUMPY_DTYPES[settings.dtype])
            if output.per == "pair":
                residues = int(len(values) ** 0.5 + 0.5)
                values = values.reshape(residues, residues)
            add_dataset(file, keys(record), values, store.id(record))
    return _manifest(output, settings, [name])


def _manifest(output: Output, settings: EmbeddingSettings, files: list[str], **more: Any) -> OutputManifest:
    described = {"format": settings.format, "dtype": settings.dtype, **more}
    return OutputManifest(
        description=output.description, per=output.per, channels=output.channels, files=files, **described
    )


def _index_part(start: int, stop: int, plan: Plan, store: Store, keys: Callable[[int], str] | None) -> dict[str, Any]:
    records = range(start, stop)
    part = {
        "id": [store.id(record) for record in records],
        "length": store.lengths[start:stop],
        "sequence": plan.sequences[start:stop],
    }
    return part if keys is None else {**part, "key": [keys(record) for record in records]}


def _by_id(store: Store) -> Callable[[int], str]:
    return lambda record: hdf5_key(store.id(record))


def _by_hash(store: Store) -> Callable[[int], str]:
    return lambda record: biotrainer_key(store.text(record))
