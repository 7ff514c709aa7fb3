"""An embedding job: from FASTA files or a store to a folder of embeddings, resumable at any moment.

In: models, sources, settings, an output folder. Out: the folder, complete under its name, or not there. Until then
everything lies in ``OUTPUT.partial``: the store, ``job.json`` of each model with what the job depends on, the shards
that are done, the log. The same command resumes there; one with another input, model or settings is refused.

Shape legend: U distinct sequences.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.background_thread import BackgroundThread
from common.errors import ConfigError, ResourceError
from common.progress import conversion_bar, record_bar, status_line
from common.publishing import made_folder, refuse_existing, write_atomically, writing
from dataset.embeddings.format import MANIFEST_FILE, Dtype, read_manifest
from dataset.store.conversion import ensure_store
from dataset.store.reader import Store
from inference.embedding.assembly import assemble
from inference.embedding.cached import Cache
from inference.embedding.plan import Plan, Shard, distinct_sequences, make_plan
from inference.embedding.report import Spent, performance, report_name
from inference.embedding.request import JobRequest
from inference.embedding.settings import EmbeddingSettings, ModelFacts, check_settings, file_format
from inference.embedding.shard_files import ShardFiles, ShardRow
from train_config.schema import DataSection
from training.launch.placement import local_resources

log = logging.getLogger(__name__)

MADE_BY = "embed"
JOB_FILE = "job.json"
_ONE_MODEL = "model"
"""Folder of the shards of a job's only model."""
MEASURED_S = 10.0
"""Seconds that a dry run measures for."""

_BYTES: dict[Dtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


class Estimate(NamedTuple):
    """What a job would take, of one model."""

    facts: ModelFacts
    plan: Plan
    disk_bytes: int
    residues_per_s: float
    seconds: float


def run_job(request: JobRequest) -> list[dict[str, Any]]:
    """Compute what is missing, publish the folder, return the report of each model.

    Raises ConfigError where the unfinished or finished output is another job's, DataError where sequences or weights
    can't be taken, ResourceError where disk, memory or workers don't suffice.
    """
    names = [request.folder_name(model) for model in request.models]
    if len(set(names)) < len(names):
        raise ConfigError("--models: two of them have the same name, and would share a folder; rename one")
    complete = [read_manifest(path.parent) for path in request.output.glob(f"**/{MANIFEST_FILE}")]
    if request.overwrite or not complete:
        refuse_existing(request.output, MADE_BY, request.overwrite)
        complete = []
    with _locked(request.partial), _logging(request.partial), ExitStack() as stack:
        if request.cluster is not None:
            from training.launch.cluster import connected

            stack.enter_context(connected(request.cluster))
        request = resolved(request)
        store = open_store(request, request.partial)
        folders = names if len(names) > 1 else [_ONE_MODEL]
        if others := {path.parent.name for path in request.partial.glob(f"*/{JOB_FILE}")} - {*folders}:
            raise _other_job(request.partial, f"of model {min(others)}")
        models = [_Model(request, model, name, store) for model, name in zip(request.models, folders, strict=True)]
        for model in models:
            model.compute([manifest.job for manifest in complete])
        if complete:
            reports = sorted(request.output.glob(f"**/{report_name('*')}"))
            return [json.loads(path.read_text(encoding="utf-8")) for path in reports]
        return _publish(request, models)


def estimate(request: JobRequest) -> list[Estimate]:
    """Size and time of a job, after a measurement of ten seconds for each model; nothing is written that stays."""
    request = resolved(request)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(request, Path(folder))
        return [_estimate(request, model, store) for model in request.models]


def resolved(request: JobRequest) -> JobRequest:
    """The request with its device and workers chosen, from the cluster where there is one."""
    nodes = local_resources()
    if request.cluster is not None:
        from training.launch.cluster import cluster_resources

        nodes = cluster_resources()
    device = request.device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    if device == "cuda" and not any(node.gpus for node in nodes):
        raise ResourceError("--device cuda: there is no GPU here; use --device cpu")
    each = request.gpus_per_worker if device == "cuda" else request.cpus_per_worker
    available = sum((node.gpus if device == "cuda" else node.cpus) for node in nodes)
    workers = request.workers or max(1, int(available / each)) if request.cluster is not None else 1
    return replace(request, device=device, workers=workers, settings=request.settings.resolved(device == "cuda"))


def open_store(request: JobRequest, folder: Path) -> Store:
    """The store that the sources are or are converted to, in the folder; refuses one of texts."""
    data = DataSection(source=request.sources, ingest=request.ingest)
    if not (len(request.sources) == 1 and (Path(request.sources[0]) / "manifest.json").is_file()):
        data = data.model_copy(update={"store": str(folder / "store")})
    with conversion_bar("reading sequences") as progress:
        return Store(ensure_store(data, folder, progress))


class _Local:
    """Shards computed in this process; one is written while the next is computed."""

    def __init__(self, request: JobRequest, source: str, store: Store, files: ShardFiles) -> None:
        from inference.embedding.encoder import Encoder
        from inference.embedding.worker import ShardWorker

        encoder = Encoder(source, request.settings, request.device or "cpu", random_weights=request.random_weights)
        self.facts: ModelFacts = encoder.facts
        self.worker = ShardWorker(encoder, store)
        self._files = files

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """Rows of the shards, each when its files are complete; ``progress`` is called with sequences computed."""
        thread: BackgroundThread[ShardRow] = BackgroundThread()
        try:
            for number, shard in enumerate(shards):
                computed, row = self.worker.compute(shard, progress)
                if number:
                    yield thread.wait()
                thread.begin(partial(self._files.write, computed, row))
            if shards:
                yield thread.wait()
        finally:
            thread.close()

    def close(self) -> None:
        """Nothing: the process ends."""


class _Cluster:
    """Shards computed by actors on Ray, which is connected."""

    def __init__(self, request: JobRequest, source: str, store: Store, files: ShardFiles) -> None:
        from inference.embedding.cluster import ActorPool, ActorSettings, default_stage_dir

        of = ActorSettings(
            source=source if not Path(source).exists() else str(Path(source).absolute()),
            settings=request.settings,
            random_weights=request.random_weights,
            store=store.path,
            stage_dir=request.stage_dir or default_stage_dir(),
            shards=files.folder.absolute(),
            cpus=request.cpus_per_worker,
            gpus=request.gpus_per_worker if request.device == "cuda" else 0,
        )
        assert request.cluster is not None
        self._pool = ActorPool(of, request.workers or 1, request.cluster.max_failures)
        self.facts = self._pool.facts

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """As :meth:`_Local.run`."""
        for row in self._pool.run(shards):
            progress(row.sequences)
            yield row

    def close(self) -> None:
        """End the actors."""
        self._pool.close()


class _Model:
    """One model of a job: its part of the unfinished folder, and what was computed."""

    def __init__(self, request: JobRequest, source: str, name: str, store: Store) -> None:
        self.request, self.source, self.name, self.store = request, source, name, store
        self.folder = request.partial / name
        self.files = ShardFiles(self.folder)
        self.facts: ModelFacts
        self.plan: Plan
        self.job: dict[str, Any] = {}
        self.rows: dict[int, ShardRow] = {}
        self.spent = Spent()

    def compute(self, complete: list[dict[str, Any]]) -> None:
        """Compute the shards that are missing; none where ``complete``, jobs of the finished output, has this one."""
        start_s = time.perf_counter()
        with status_line() as show:
            show(f"loading {self.source}")
            kind = _Local if self.request.cluster is None else _Cluster
            engine = kind(self.request, self.source, self.store, self.files)
        try:
            self.facts = engine.facts
            check_settings(self.request.settings, self.facts.outputs)
            cache = self._cache()
            self.plan = self._plan(cache)
            self.job = self._identity()
            if complete:
                _check_complete(complete, self.job, self.request)
                return
            _check_job(self.folder / JOB_FILE, self.job, self.request)
            self._restore(cache)
            todo = [number for number in range(self.plan.num_shards) if number not in self.rows]
            before, computing_s = self.spent.model_copy(), time.perf_counter()
            if not todo:
                return
            known = sum(row.sequences for row in self.rows.values())
            log.info("%s: %d of %d shards to compute", self.source, len(todo), self.plan.num_shards)
            with record_bar(f"embedding by {self.source}") as bar:
                done = known

                def progress(sequences: int) -> None:
                    nonlocal done
                    done += sequences
                    bar(done / self.plan.num_sequences, done)

                progress(0)
                for row in engine.run([self.plan.shard(number) for number in todo], progress):
                    self.rows[row.number] = row
                    now_s = time.perf_counter()
                    self.spent.seconds = before.seconds + now_s - start_s
                    self.spent.computing_s = before.computing_s + now_s - computing_s
                    self._write_spent()
                    rate = row.residues / row.seconds
                    log.info("shard %d: %d sequences, %.0f residues/s", row.number, row.sequences, rate)
                    if row.splits:
                        log.warning("shard %d: %d batches were split for want of memory", row.number, row.splits)
                    if cache is not None:
                        cache.keep(row.number, self.plan, self.store, self.files)
        finally:
            engine.close()

    def assemble(self, building: Path, show: Callable[[str], None]) -> dict[str, Any]:
        """Write the final files and the report, which is returned."""
        start_s = time.perf_counter()
        settings = self.request.settings
        job = {**self.job, "batches_split": sum(row.splits for row in self.rows.values())}
        assemble(building, self.facts, self.plan, self.store, self.files, settings, job, show)
        rows = [self.rows[number] for number in sorted(self.rows)]
        self.spent.seconds += time.perf_counter() - start_s
        report = performance(self.facts, self.plan, rows, settings, self.spent, self.request.workers or 1)
        name = report_name(self.request.device or "cpu")
        write_atomically(building / name, json.dumps(report, indent=1) + "\n")
        return report

    def _cache(self) -> Cache | None:
        if self.request.cache is None:
            return None
        return Cache(self.request.cache, self.request.cache_bytes, self.facts, self.request.settings)

    def _plan(self, cache: Cache | None) -> Plan:
        """The plan; sequences that were cached when the job was first started stay so."""
        path, known = self.folder / "known.npy", None
        if path.is_file():
            known = np.load(path)
        elif cache is not None and not (self.folder / JOB_FILE).exists():
            known = cache.known(self.store.sequence_hashes[distinct_sequences(self.store)[0]])
        plan = make_plan(self.store, self.request.settings, self.facts.longest, known)
        if known is not None and not path.exists():
            with writing(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                np.save(path, known)
        return plan

    def _write_spent(self) -> None:
        write_atomically(self.folder / "spent.json", self.spent.model_dump_json())

    def _identity(self) -> dict[str, Any]:
        """What the bytes of the result depend on."""
        return {
            "input": self.store.checksum,
            "model": self.facts.fingerprint,
            "device": self.facts.device_name,
            "settings": self.request.settings.model_dump(mode="json"),
            "plan": self.plan.checksum,
        }

    def _restore(self, cache: Cache | None) -> None:
        """Take up what is done, and what is cached."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / JOB_FILE, json.dumps(self.job, indent=1) + "\n")
        self.rows = self.files.done()
        if (self.folder / "spent.json").is_file():
            self.spent = Spent.model_validate_json((self.folder / "spent.json").read_bytes())
        if self.rows:
            log.info("%s: resuming, %d of %d shards are done", self.source, len(self.rows), self.plan.num_shards)
        self.spent.starts += 1
        self._write_spent()
        if self.plan.num_cached and not all(number in self.rows for number in range(self.plan.num_cached)):
            if cache is None:
                raise ConfigError("--cache: the job was started with a cache; give the same one to resume it")
            self.rows |= {row.number: row for row in cache.restore(self.plan, self.store, self.files)}


def _publish(request: JobRequest, models: list[_Model]) -> list[dict[str, Any]]:
    with made_folder(request.output, MADE_BY, request.overwrite) as building, status_line() as show:
        reports = []
        for model in models:
            folder = building if len(models) == 1 else building / model.name
            folder.mkdir(exist_ok=True)
            reports.append(model.assemble(folder, show))
        shutil.copytree(request.partial / "logs", building / "logs")
    shutil.rmtree(request.partial)
    return reports


def _check_job(path: Path, job: dict[str, Any], request: JobRequest) -> None:
    """Refuse what is there of another job, naming what differs."""
    if not path.is_file():
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    if found := _difference(there, job):
        raise _other_job(request.partial, found)


def _other_job(folder: Path, difference: str) -> ConfigError:
    return ConfigError(
        f"{folder}: holds the unfinished work of another job ({difference}); choose another --output, or remove this "
        "folder"
    )


def _check_complete(complete: list[dict[str, Any]], job: dict[str, Any], request: JobRequest) -> None:
    """Refuse a finished output of another job, naming what differs."""
    if all(_difference(there, job) for there in complete):
        raise ConfigError(
            f"{request.output}: exists already, of another job ({_difference(complete[0], job)}); choose another "
            "--output, or pass --overwrite"
        )


def _difference(there: dict[str, Any], now: dict[str, Any], prefix: str = "") -> str:
    """The first thing in which two jobs differ, in words; empty where they are one."""
    for key in now:
        old, new = there.get(key), now[key]
        if isinstance(new, dict) and isinstance(old, dict):
            if found := _difference(old, new, f"{key}."):
                return found
        elif old != new:
            return f"{prefix}{key}: {old} there, {new} now"
    return ""


def _estimate(request: JobRequest, source: str, store: Store) -> Estimate:
    engine = _Local(request, source, store, ShardFiles(Path()))
    facts, settings = engine.facts, request.settings
    check_settings(settings, facts.outputs)
    plan = make_plan(store, settings, facts.longest)
    flops = _flops(facts, plan.lengths)
    measured_flops = measured_tokens = 0.0
    start_s: float | None = None
    random = np.random.default_rng(0)
    with status_line() as show:
        show(f"measuring {source}")
        while start_s is None or time.perf_counter() - start_s < MEASURED_S:
            shard = plan.shard(int(random.integers(plan.num_shards)))
            batches = shard.batches()
            piece = shard.part(batches[int(random.integers(len(batches)))])
            engine.worker.compute(piece)
            if start_s is None:  # the first warms up
                start_s = time.perf_counter()
                continue
            measured_flops += _flops(facts, piece.lengths)
            measured_tokens += float(piece.lengths.sum())
    passed_s = time.perf_counter() - start_s
    seconds = flops / (measured_flops / passed_s) / (request.workers or 1)
    return Estimate(facts, plan, _disk_bytes(facts, plan, store, settings), measured_tokens / passed_s, seconds)


def _flops(facts: ModelFacts, lengths: np.ndarray) -> float:
    return facts.flops_per_token * float(lengths.sum()) + facts.attention_flops * float(
        (lengths.astype(float) ** 2).sum()
    )


def _disk_bytes(facts: ModelFacts, plan: Plan, store: Store, settings: EmbeddingSettings) -> int:
    """Of the outputs, without ids."""
    total = 0
    for output in facts.outputs:
        lengths = plan.lengths[plan.sequences] if file_format(settings, output) == "hdf5" else plan.lengths
        rows = {"protein": len(store), "residue": int(lengths.sum()), "pair": int((lengths**2).sum())}[output.per]
        total += rows * output.channels * _BYTES[settings.dtype]
    return total


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the unfinished folder, and remove it where no job was accepted. Raises ResourceError where it is held."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceError(f"{folder}: another process is computing this job; wait for it, or end it") from error
        try:
            yield
        finally:
            if not any(folder.glob(f"*/{JOB_FILE}")):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


@contextmanager
def _logging(folder: Path) -> Iterator[None]:
    """A log file named by the time, in the unfinished folder."""
    with writing(folder):
        (folder / "logs").mkdir(exist_ok=True)
        name = f"embed-{datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}.log"
        handler = logging.FileHandler(folder / "logs" / name, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("inference.embedding")
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        yield
    except BaseException as error:
        log.error("ended: %s: %s", type(error).__name__, error)
        raise
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
