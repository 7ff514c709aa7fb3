"""Assemble the final files of a job from its complete shards. Interruptions don't change the result.

The files are:

- outputs of proteins: one file each, in input order
- outputs of residues: the shards, as hard links
- HDF5, if chosen, in place of either
- the index and, last, the manifest

Shape legend: N records, n records of a part, C channels.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.dataset.embeddings.arrays import as_float32
from esmeray.dataset.embeddings.formats.base import Block, Source, Values
from esmeray.dataset.embeddings.formats.hdf5 import biotrainer_key, hdf5_key
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import (
    INDEX_ROWS,
    EmbeddingsManifest,
    OutputManifest,
    ranges,
    write_index,
    write_manifest,
)
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.plan import Plan, format_of
from esmeray.inference.embedding.section import EmbedSection
from esmeray.inference.embedding.shard_files import ShardFiles, ShardRow
from esmeray.inference.models.kinds import Output


class Assembly:
    """Writes the files of a model's embeddings to the folder ``building``."""

    def __init__(
        self,
        building: Path,
        plan: Plan,
        store: Store,
        shards: ShardFiles,
        rows: Sequence[ShardRow],
        settings: EmbedSection,
    ) -> None:
        """``rows``: rows of all shards, in order."""
        self._building, self._plan, self._store = building, plan, store
        self._shards, self._rows, self._settings = shards, rows, settings
        # Each shard is mapped and verified once, not per record. The cache is bounded, because each shard is an open
        # file.
        self._open = lru_cache(maxsize=1024)(lambda output, number: shards.arrays(output, rows[number]))

    def write(self, outputs: tuple[Output, ...], job: dict[str, Any], show: Callable[[str], None]) -> None:
        """Write all files. Raises ResourceError if the disk is full."""
        manifests = {}
        for output in outputs:
            show(f"writing {output.name}")
            manifests[output.name] = self._merged(output)
        show("writing the index")
        records = self._plan.chosen.size
        write_index(
            self._building,
            (self._index_part(*rows) for rows in ranges(records, INDEX_ROWS)),
            has_keys=FORMATS[self._settings.format].has_keys,
        )
        manifest = EmbeddingsManifest(
            num_records=records, num_sequences=self._plan.num_sequences, outputs=manifests, job=job
        )
        # The manifest is written last: a folder with a manifest is complete.
        write_manifest(self._building, manifest)

    def _merged(self, output: Output) -> OutputManifest:
        file_format = format_of(self._settings, output)

        def blocks(rows: int) -> Iterator[Block]:
            for start, stop in ranges(self._plan.chosen.size, rows):
                records = self._plan.chosen[start:stop]
                keys = [self._key(record) for record in records.tolist()] if file_format.has_keys else None
                yield Block(
                    [self._store.id(record) for record in records.tolist()],
                    self._store.lengths[records],
                    self._values(output, start, stop),
                    keys,
                )

        def largest() -> Values:  # over all shards: int8 has one scale per channel for the whole file
            shards = (self._open(output.name, number) for number in range(self._plan.num_shards))
            return np.max([np.abs(shard["values"]).max(axis=0) for shard in shards], axis=0)

        manifest = OutputManifest(
            description=output.description,
            per=output.per,
            channels=output.channels,
            dtype=self._settings.dtype,
            format=file_format.name,
        )
        # Shards are linked without being read, so they are verified here; other files are verified when read.
        linked = self._rows if file_format.name == "safetensors" else []
        shards = [self._shards.verified(output.name, row) for row in linked]
        source = Source(self._plan.chosen.size, blocks, largest, shards, self._plan.bounds[:-1].tolist())
        return file_format.merge(self._building, output.name, manifest, source)

    def _values(self, output: Output, start: int, stop: int) -> Any:
        """(n, C) fp32 for records ``start`` to ``stop``; for residues or pairs a list of (L, C) or (L, L) arrays."""
        if output.per == "protein":
            return self._of_proteins(output, start, stop)
        return [self._of_sequence(output, sequence) for sequence in self._plan.sequences[start:stop].tolist()]

    def _of_proteins(self, output: Output, start: int, stop: int) -> Values:
        """(n, C) fp32 for records ``start`` to ``stop``."""
        sequences_n, bounds = self._plan.sequences[start:stop], self._plan.bounds
        shards_n = bounds.searchsorted(sequences_n, side="right") - 1
        rows_nC = np.empty((stop - start, output.channels), dtype=np.float32)
        for number in np.unique(shards_n).tolist():  # one gather per shard instead of one read per record
            chosen = shards_n == number
            rows_nC[chosen] = self._open(output.name, number)["values"][sequences_n[chosen] - bounds[number]]
        return rows_nC

    def _of_sequence(self, output: Output, sequence: int) -> Values:
        """(L, C) fp32 of one sequence; (L, L) for pairs."""
        bounds = self._plan.bounds
        number = int(bounds.searchsorted(sequence, side="right")) - 1
        arrays = self._open(output.name, number)
        index = sequence - int(bounds[number])
        start, stop = arrays["offsets"][index : index + 2]
        rows = as_float32(arrays["values"][start:stop])
        return rows.reshape((self._plan.lengths[sequence],) * 2) if output.per == "pair" else rows

    def _index_part(self, start: int, stop: int) -> dict[str, Any]:
        records = self._plan.chosen[start:stop]
        keys_n2 = self._store.sequence_keys(records)
        index = {
            "id": [self._store.id(record) for record in records.tolist()],
            "length": self._store.lengths[records],
            "sequence": self._plan.sequences[start:stop],
            "hash": keys_n2[:, 0],
            "second_hash": keys_n2[:, 1],
        }
        if FORMATS[self._settings.format].has_keys:
            index["key"] = [self._key(record) for record in records.tolist()]
        return index

    def _key(self, record: int) -> str:
        by_id = self._settings.hdf5_key == "id"
        return hdf5_key(self._store.id(record)) if by_id else biotrainer_key(self._store.text(record))
