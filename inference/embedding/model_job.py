"""The part of an embedding job that is one model's: what is done, what is missing, and the final files.

``job.json`` in its unfinished folder is what the bytes of the result depend on: another job's is refused, naming what
differs.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError, parsing
from esmeray.common.progress import record_bar, status_line
from esmeray.common.publishing import write_atomically, writing
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.assembly import Assembly
from esmeray.inference.embedding.plan import JobFacts, Plan, check_settings, distinct_sequences, make_plan
from esmeray.inference.embedding.report import Spent, performance, report_name
from esmeray.inference.embedding.section import EmbedJobSection, EmbedSection
from esmeray.inference.embedding.shard_files import Cache, ShardFiles
from esmeray.inference.embedding.worker import LocalEngine
from esmeray.run_folder.job import JOB_FILE, accept, differences, other_job

log = logging.getLogger(__name__)


class ModelJob:
    """One model of a job: its part of the unfinished folder, and what was computed."""

    def __init__(
        self, settings: EmbedJobSection, cluster: RaySection | None, source: str, files: ShardFiles, store: Store
    ) -> None:
        self.settings, self.cluster, self.source, self.files, self.store = settings, cluster, source, files, store
        self.folder = files.folder
        self.spent = Spent()

    def compute(self, complete: list[dict[str, Any]]) -> None:
        """Compute the shards that are missing; none where ``complete``, jobs of the finished output, has this one."""
        start_s = time.perf_counter()
        with status_line() as show:
            show(f"loading {self.source}")
            engine = self._engine()
        try:
            self.facts: JobFacts = engine.facts
            check_settings(self.settings, self.facts.outputs)
            root = self.settings.cache
            cache = None if root is None else Cache(root.absolute(), self.facts, self.settings)
            self.plan = self._plan(cache)
            self.job: dict[str, Any] = {
                "input": self.store.checksum,
                "model": self.facts.fingerprint,
                "device": self.facts.device_name,
                # A device that was asked for and one by default compute the same: its name above is what counts. So do
                # layers that are in memory and those that are read.
                "settings": self.settings.model_dump(
                    mode="json", include=EmbedSection.model_fields.keys() - {"device", "stream"}
                ),
                "plan": self.plan.checksum,
            }
            # After the model is loaded: only then its fingerprint says whether the finished output is of this job.
            if complete:
                changes = [differences(before, self.job) for before in complete]
                if all(changes):
                    raise other_job(
                        self.settings.output, changes[0][0], "choose another --embed.output, or pass --overwrite"
                    )
                return
            accept(self.folder.parent, self.job, f"{self.folder.name}/{JOB_FILE}")
            self.files.keep(self.folder / JOB_FILE)
            self._restore(cache)
            todo = [number for number in range(self.plan.num_shards) if number not in self.rows]
            if not todo:
                return
            before, computing_s = self.spent.model_copy(), time.perf_counter()
            log.info("%s: %d of %d shards to compute", self.source, len(todo), self.plan.num_shards)
            with record_bar(f"embedding by {self.source}") as bar:
                done = sum(row.sequences for row in self.rows.values())

                def progress(sequences: int) -> None:
                    nonlocal done
                    done += sequences
                    bar(done / self.plan.num_sequences, done)

                progress(0)
                for row in engine.run([self.plan.shard(number) for number in todo], progress):
                    self.rows[row.number] = row
                    # After each shard, so that a killed process loses the time of none that counts.
                    now_s = time.perf_counter()
                    self.spent.seconds = before.seconds + now_s - start_s
                    self.spent.computing_s = before.computing_s + now_s - computing_s
                    self._write_spent()
                    log.info(
                        "shard %d: %d sequences, %.0f residues/s",
                        row.number,
                        row.sequences,
                        row.residues / row.seconds,
                    )
                    if row.splits:
                        log.warning("shard %d: %d batches were split for want of memory", row.number, row.splits)
                    if cache is not None:
                        self.files.fetch()  # an actor of another node has uploaded it, where the folder is at a URI
                        cache.keep(row, self.plan, self.store, self.files)
        finally:  # also for a refusal: actors hold their devices until they are closed
            engine.close()

    def assemble(self, building: Path, show: Callable[[str], None]) -> dict[str, Any]:
        """Write the final files and the report, which is returned."""
        start_s = time.perf_counter()
        self.files.fetch()
        job = {**self.job, "batches_split": sum(row.splits for row in self.rows.values())}
        rows = [self.rows[number] for number in sorted(self.rows)]  # actors finish them in any order
        Assembly(building, self.plan, self.store, self.files, rows, self.settings).write(self.facts.outputs, job, show)
        self.spent.seconds += time.perf_counter() - start_s
        report = performance(self.facts, self.plan, rows, self.settings, self.spent)
        write_atomically(building / report_name(self.settings.device or "cpu"), json.dumps(report, indent=1) + "\n")
        return report

    def _engine(self) -> Any:
        job = self.settings, self.source, self.store, self.files
        if self.cluster is None:
            return LocalEngine(*job)
        from esmeray.inference.embedding.cluster import ClusterEngine  # here: it needs Ray

        return ClusterEngine(*job, max_failures=self.cluster.max_failures)

    def _plan(self, cache: Cache | None) -> Plan:
        """The plan; sequences that were cached when the job was first started stay so."""
        # What the cache holds changes while the job is stopped, by other jobs; the plan, which follows it, must not.
        path, known = self.folder / "known.npy", None
        if path.is_file():
            with parsing(path, "remove the unfinished folder"):
                known = np.load(path)
        elif cache is not None and not (self.folder / JOB_FILE).exists():  # else it was started without a cache
            known = cache.known(self.store.sequence_keys(distinct_sequences(self.store)[0]))
        plan = make_plan(self.store, self.settings, self.facts.longest, known)
        if known is not None and not path.exists():
            with writing(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                np.save(path, known)
            self.files.keep(path)
        return plan

    def _write_spent(self) -> None:
        write_atomically(self.folder / "spent.json", self.spent.model_dump_json())

    def _restore(self, cache: Cache | None) -> None:
        self.rows = self.files.done()
        if (self.folder / "spent.json").is_file():
            path = self.folder / "spent.json"
            with parsing(path, "remove it: the report then lacks the time of earlier starts"):
                self.spent = Spent.model_validate_json(path.read_bytes())
        if self.rows:
            log.info("%s: resuming, %d of %d shards are done", self.source, len(self.rows), self.plan.num_shards)
        self.spent.starts += 1
        self._write_spent()
        if self.plan.num_cached and not all(number in self.rows for number in range(self.plan.num_cached)):
            if cache is None:
                raise ConfigError("--embed.cache: the job was started with a cache; give the same one to resume it")
            self.rows |= {row.number: row for row in cache.restore(self.plan, self.store, self.files)}
