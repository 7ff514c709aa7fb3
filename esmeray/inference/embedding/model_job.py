"""One model's part of an embedding job: finished work, missing shards, and the final files.

``job.json`` in its unfinished folder records everything that the bytes of the result depend on. A job that differs is
rejected, and the message names the difference.

The final files are made from complete shards. Interruptions don't change the result. They are:

- outputs of proteins: one file each, in input order
- outputs of residues: the shards, as hard links
- HDF5, if chosen, in place of either
- the index and, last, the manifest

Shape legend: N records, n records of a part, C channels.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from esmeray.cluster.section import RaySection
from esmeray.common.errors import parsing
from esmeray.common.progress import record_bar, status_line
from esmeray.common.publishing import file_xxh128, write_atomically, writing
from esmeray.dataset.batches.plan import Indices
from esmeray.dataset.embeddings.arrays import as_float32
from esmeray.dataset.embeddings.formats.base import Block, Source, Values
from esmeray.dataset.embeddings.formats.hdf5 import biotrainer_key, hdf5_key
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import (
    CONTINUES,
    INDEX_ROWS,
    MANIFEST_FILE,
    EmbeddingsManifest,
    Index,
    OutputManifest,
    ranges,
    write_index,
    write_manifest,
    write_training,
)
from esmeray.dataset.fasta.counts import count_lines
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.known import EarlierOutput, KnownValues, find_known, write_known
from esmeray.inference.embedding.plan import (
    JobFacts,
    Plan,
    check_settings,
    distinct_sequences,
    format_of,
    make_plan,
)
from esmeray.inference.embedding.section import EmbedJobSection, EmbedSection, report_name
from esmeray.inference.embedding.shard_files import Cache, ShardFiles, ShardRow
from esmeray.inference.models.kinds import Output
from esmeray.inference.models.source import ModelSource
from esmeray.run_folder.job import JOB_FILE, accept, differences, other_job

log = logging.getLogger(__name__)

KNOWN_FILE = "known.npy"
OTHER_OUTPUT = "choose another --embed.output, or pass --overwrite"


class ModelJob:
    """One model of a job, with its unfinished folder and its results."""

    def __init__(
        self,
        settings: EmbedJobSection,
        cluster: RaySection | None,
        source: ModelSource,
        files: ShardFiles,
        store: Store,
        before: Index | None = None,
    ) -> None:
        """``before``: the finished output to grow. Raises DataError if an id has another sequence there."""
        self.settings, self.cluster, self.source, self.files, self.store = settings, cluster, source, files, store
        self.before = before
        self.folder = files.folder
        self.chosen = np.arange(len(store)) if before is None else _new_records(store, before, settings)

    def compute(self) -> None:
        """Compute the missing shards. Raises ConfigError if the output to grow has another model or settings."""
        with status_line() as show:
            show(f"loading {self.source.name}")
            engine = self._engine()
        try:
            self.facts: JobFacts = engine.facts
            check_settings(self.settings, self.facts.outputs)
            self._accept()
            if self.chosen.size:
                self.unknown = self.facts.unknown.report(self.store.text(record) for record in self.chosen.tolist())
                self._restore()
                self._compute_missing(engine)
        finally:  # also after an error: actors hold their devices until they are closed
            engine.close()

    def assemble(self, building: Path) -> dict[str, Any]:
        """Write the final files and the report, and return the report."""
        from esmeray.inference.embedding.report import performance  # imported here, because it loads torch

        self.files.fetch()
        # Each shard is mapped and verified once, not per record. The cache is bounded, because each shard is an open
        # file.
        self._open = lru_cache(maxsize=1024)(lambda output, number: self.files.arrays(output, self.rows[number]))
        rows = [self.rows[number] for number in sorted(self.rows)]  # actors finish them in any order
        records = self.chosen.size
        manifests = {}
        write_training(building, [self.source])
        with status_line() as show:
            for output in self.facts.outputs:
                show(f"writing {output.name}")
                manifests[output.name] = self._merged(building, output, rows)
            show("writing the index")
            parts = (self._index_part(*bounds) for bounds in ranges(records, INDEX_ROWS))
            write_index(building, parts, has_keys=FORMATS[self.settings.format].has_keys)
        self._open.cache_clear()
        job = {**self.job, "batches_split": sum(row.splits for row in rows)}
        # The manifest is written last: a folder with a manifest is complete.
        write_manifest(
            building,
            EmbeddingsManifest(num_records=records, num_sequences=self.plan.num_sequences, outputs=manifests, job=job),
        )
        report = performance(self.facts, self.plan, rows, self.settings, count_lines(self.store.manifest.counts))
        report["unknown"] = self.unknown
        write_atomically(building / report_name(self.settings.device or "cpu"), json.dumps(report, indent=1) + "\n")
        return report

    def _merged(self, building: Path, output: Output, rows: Sequence[ShardRow]) -> OutputManifest:
        file_format = format_of(self.settings, output)

        def blocks(size: int) -> Iterator[Block]:
            for start, stop in ranges(self.chosen.size, size):
                records = self.chosen[start:stop]
                sequences_n = self.plan.sequences[start:stop]
                if output.per == "protein":
                    values: Any = self._of_proteins(output, sequences_n)
                else:
                    values = [self._of_sequence(output, sequence) for sequence in sequences_n.tolist()]
                keys = [self._key(record) for record in records.tolist()] if file_format.has_keys else None
                yield Block(
                    [self.store.id(record) for record in records.tolist()], self.store.lengths[records], values, keys
                )

        def largest() -> Values:  # over all shards: int8 has one scale per channel for the whole file
            shards = (self._open(output.name, number) for number in range(self.plan.num_shards))
            return np.max([np.abs(shard["values"]).max(axis=0) for shard in shards], axis=0)

        manifest = OutputManifest(
            description=output.description,
            per=output.per,
            channels=output.channels,
            dtype=self.settings.dtype,
            format=file_format.name,
        )
        # Shards are linked without being read, so they are verified here; other files are verified when read.
        linked = rows if file_format.name == "safetensors" else []
        shards = [self.files.verified(output.name, row) for row in linked]
        source = Source(self.chosen.size, blocks, largest, shards, self.plan.bounds[:-1].tolist())
        return file_format.merge(building, output.name, manifest, source)

    def _of_proteins(self, output: Output, sequences_n: Indices) -> Values:
        """(n, C) fp32 of sequences."""
        bounds = self.plan.bounds
        shards_n = bounds.searchsorted(sequences_n, side="right") - 1
        rows_nC = np.empty((len(sequences_n), output.channels), dtype=np.float32)
        for number in np.unique(shards_n).tolist():  # one gather per shard instead of one read per record
            chosen = shards_n == number
            rows_nC[chosen] = self._open(output.name, number)["values"][sequences_n[chosen] - bounds[number]]
        return rows_nC

    def _of_sequence(self, output: Output, sequence: int) -> Values:
        """(L, C) fp32 of one sequence; (L, L) for pairs."""
        bounds = self.plan.bounds
        number = int(bounds.searchsorted(sequence, side="right")) - 1
        arrays = self._open(output.name, number)
        index = sequence - int(bounds[number])
        start, stop = arrays["offsets"][index : index + 2]
        rows = as_float32(arrays["values"][start:stop])
        return rows.reshape((self.plan.lengths[sequence],) * 2) if output.per == "pair" else rows

    def _index_part(self, start: int, stop: int) -> dict[str, Any]:
        records = self.chosen[start:stop]
        keys_n2 = self.store.sequence_keys(records)
        index = {
            "id": [self.store.id(record) for record in records.tolist()],
            "length": self.store.lengths[records],
            "sequence": self.plan.sequences[start:stop],
            "hash": keys_n2[:, 0],
            "second_hash": keys_n2[:, 1],
        }
        if FORMATS[self.settings.format].has_keys:
            index["key"] = [self._key(record) for record in records.tolist()]
        return index

    def _key(self, record: int) -> str:
        by_id = self.settings.hdf5_key == "id"
        return hdf5_key(self.store.id(record)) if by_id else biotrainer_key(self.store.text(record))

    def _engine(self) -> Any:
        job = self.settings, self.source, self.store, self.files
        # Imported here: they load torch and Ray.
        if self.cluster is None:
            from esmeray.inference.embedding.worker import LocalEngine

            return LocalEngine(*job)
        from esmeray.inference.embedding.cluster import ClusterEngine

        return ClusterEngine(*job, max_failures=self.cluster.max_failures)

    def _compute_missing(self, engine: Any) -> None:
        todo = [number for number in range(self.plan.num_shards) if number not in self.rows]
        log.info("%s: %d of %d shards to compute", self.source.name, len(todo), self.plan.num_shards)
        done = sum(row.sequences for row in self.rows.values())
        with record_bar(f"embedding by {self.source.name}") as bar:

            def progress(sequences: int) -> None:
                nonlocal done
                done += sequences
                bar(done / self.plan.num_sequences, done)

            progress(0)
            for row in engine.run([self.plan.shard(number) for number in todo], progress):
                self.rows[row.number] = row
                rate = row.residues / row.seconds
                log.info("shard %d: %d sequences, %.0f residues/s", row.number, row.sequences, rate)
                if row.splits:
                    log.warning("shard %d: %d batches were split after running out of memory", row.number, row.splits)
                if self._cache is not None:
                    self.files.fetch()  # at a URI, an actor on another node may have uploaded it
                    self._cache.keep(row, self.plan, self.store, self.files)

    def _identity(self) -> dict[str, Any]:
        """The model and the settings that values depend on."""
        # Outputs from before the setting `weights` existed lack it; they have stored weights.
        left_out = {"device", "stream", *(["weights"] if self.settings.weights == "stored" else [])}
        names = EmbedSection.model_fields.keys() - left_out
        return {
            "model": self.facts.fingerprint,
            "device": self.facts.device_name,
            # The device's name above identifies it, however it was chosen. Streamed layers give the same values as
            # layers in memory.
            "settings": self.settings.model_dump(mode="json", include=names),
        }

    def _accept(self) -> None:
        """Compare the job with finished and unfinished work, plan it and write its identity."""
        settings = self.settings
        identity = self._identity()
        # After the model is loaded, because its fingerprint shows whether the finished output belongs to this job.
        changes = [] if self.before is None else differences(self.before.manifest.job, identity)
        if changes:
            raise other_job(settings.output, changes[0], OTHER_OUTPUT)
        if not self.chosen.size:  # the output has all records
            return
        self._cache = Cache(settings.cache.absolute(), self.facts, settings) if settings.cache else None
        # Fixed numbers, because a resumed job uses them to find its values again.
        self._sources: dict[int, KnownValues] = {} if self._cache is None else {0: self._cache}
        if self.before is not None and settings.dtype != "int8":  # int8 would be rounded twice
            self._sources[1] = EarlierOutput(self.before, self.facts.outputs, identity, settings)
        others = [EarlierOutput(Index(folder), self.facts.outputs, identity, settings) for folder in settings.known]
        self._sources |= dict(enumerate(others, 2))
        self.plan = self._plan()
        self.job: dict[str, Any] = {"input": self.store.checksum, **identity, "plan": self.plan.checksum}
        earlier = [other.index for other in others]
        # Recorded instead of rejected: vectors from another device differ in their last bits only.
        if earlier:
            self.job["known"] = [f"{index.source} ({index.manifest.job.get('device')})" for index in earlier]
        if self.before is not None:
            self.job[CONTINUES] = file_xxh128(self.before.parts[-1].folder / MANIFEST_FILE)
            earlier.append(self.before)
        accept(self.folder.parent, self.job, f"{self.folder.name}/{JOB_FILE}")
        # Added after `accept`, because a job may resume on another processor. Recorded instead of rejected, as above.
        self.job["arithmetic"] = self.facts.arithmetic
        self._compare_arithmetic(earlier)
        self.files.keep(self.folder / JOB_FILE)

    def _compare_arithmetic(self, earlier: Sequence[Index]) -> None:
        """Log the outputs whose values may differ from this job's in the last bits."""
        for index in earlier:
            theirs = index.manifest.job.get("arithmetic")
            if theirs != self.facts.arithmetic:
                log.warning(
                    "%s was computed with %s, but this job uses %s: vectors of a sequence may differ in the last bits",
                    index.source,
                    theirs or "unknown arithmetic",
                    self.facts.arithmetic,
                )

    def _plan(self) -> Plan:
        """Make the plan. Sequences that were known at the first start stay known."""
        # Other jobs may change the cache while this job is stopped. The plan depends on it, so it is fixed at the first
        # start.
        path = self.folder / KNOWN_FILE
        known = None
        if path.is_file():
            with parsing(path, "remove the unfinished folder"):
                known = np.load(path)
        elif not (self.folder / JOB_FILE).exists():  # otherwise it was started without a source
            known = find_known(self._sources, self.store, distinct_sequences(self.store, self.chosen)[0])
        plan = make_plan(self.store, self.settings, self.facts.longest, known, self.chosen, self.facts.outputs)
        if known is not None and not path.exists():
            with writing(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                np.save(path, known)
            self.files.keep(path)
        return plan

    def _restore(self) -> None:
        """Find the shards of earlier starts, and write the shards of known sequences."""
        self.rows = self.files.done()
        if self.rows:
            log.info("%s: resuming, %d of %d shards done", self.source.name, len(self.rows), self.plan.num_shards)
        if not all(number in self.rows for number in range(self.plan.num_cached)):
            known = np.load(self.folder / KNOWN_FILE)
            written = write_known(self._sources, known, self.plan, self.store, self.files, self.facts.outputs)
            self.rows |= {row.number: row for row in written}


def _new_records(store: Store, before: Index, settings: EmbedJobSection) -> Indices:
    """Records of a store whose ids an output lacks. Raises DataError for an id that has another sequence there."""

    def ids(start: int, stop: int) -> Any:  # in blocks, because all ids as Python strings would take gigabytes
        return pa.array([store.id(record) for record in range(start, stop)])

    every_id = pa.chunked_array([ids(*rows) for rows in ranges(len(store), INDEX_ROWS)])
    numbers = pc.index_in(every_id, before.column("id"))
    is_there = numbers.is_valid().to_numpy()
    source = ", ".join(settings.input)
    before.refuse_other_sequences(
        numbers.drop_null().to_numpy(),
        store.sequence_keys(np.flatnonzero(is_there)),
        source,
        f"give it another id in {source}, or {OTHER_OUTPUT}",
    )
    return np.flatnonzero(~is_there)
