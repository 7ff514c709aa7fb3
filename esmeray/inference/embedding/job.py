"""Run an embedding job, from FASTA files or a store to a folder of embeddings, or estimate it.

The output folder appears when it is complete. Until then ``OUTPUT.partial`` holds:

- the store
- ``job.json`` per model, with everything that the result depends on
- the finished shards
- the log

The same command resumes the job; a job with another input, model or settings is rejected.

A finished folder can grow: a second job embeds the records of the input that it lacks, in ``OUTPUT.grown.partial``.
Then its results are added as a part, a subfolder.

This module does not import torch, so that mistakes are reported at once.
"""

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.cluster.placement import local_resources
from esmeray.cluster.section import RaySection
from esmeray.common.command_line import logged_to
from esmeray.common.errors import ConfigError, ResourceError, read_json
from esmeray.common.progress import status_line
from esmeray.common.publishing import made_folder, recover, refuse_existing, sync, writing
from esmeray.common.remote import current, publish, retried, storage, target_path, upload_folder, uri_of
from esmeray.common.text import counted, duration
from esmeray.dataset.embeddings.manifest import MANIFEST_FILE, Index, part_name
from esmeray.dataset.section import DataSection, IngestSection
from esmeray.dataset.store.conversion import job_store, store_location
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.model_job import OTHER_OUTPUT, ModelJob
from esmeray.inference.embedding.plan import check_registered, check_settings, format_of, make_plan
from esmeray.inference.embedding.section import EmbedJobSection, report_name
from esmeray.inference.embedding.shard_files import ShardFiles
from esmeray.inference.models.source import ModelSource, check_model
from esmeray.run_folder.job import JOB_FILE, REMEDY, other_job, unfinished

log = logging.getLogger(__name__)

MADE_BY = "embed"
MEASURED_S = 10.0


def run_job(
    job: EmbedJobSection,
    ingest: IngestSection | None = None,
    *,
    cluster: RaySection | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Compute missing results, publish the folder or the part added to it, and return the models' reports.

    ``cluster``: Ray settings if actors compute; None for this process.

    Raises:
        ConfigError: the unfinished or finished output belongs to another job.
        DataError: sequences or weights are invalid, or an id has another sequence in the finished output.
        ResourceError: disk, memory or workers don't suffice.
    """
    sources = _checked(job)
    # Names must be valid as folders on any file system, and in a URI.
    names = [re.sub(r"[^\w.+-]+", "_", Path(model).name or model) for model in job.models]
    if len(set(names)) < len(names):
        raise ConfigError("--embed.models: two models have the same name and would share a folder; rename one")
    # With one model the output is its folder. Adding a second model is another job, so that no folder has to move.
    folders = names if len(names) > 1 else [""]
    output = target_path(job.output)
    recover(output)
    before = [] if overwrite else _finished(job, output, folders)
    if not before:
        refuse_existing(output, MADE_BY, overwrite)
    with _computed(job, ingest, cluster, sources, folders, output, before) as (partial, models):
        if before:
            # The missing records have been embedded. Merge them now.
            for model, index, folder in zip(models, before, folders, strict=True):
                part = output / folder / part_name(len(index.parts))
                _add_part(model, partial / "logs", output, part, uri_of(job.output))
            return _reports(job, output)
        reports = []
        with made_folder(output, MADE_BY, overwrite) as building:
            for model, folder in zip(models, folders, strict=True):
                (building / folder).mkdir(exist_ok=True)
                reports.append(model.assemble(building / folder))
            shutil.copytree(partial / "logs", building / "logs")
        # Inside the block of the unfinished folder, so that it is removed only when the URI has all files.
        publish(job.output)
    return reports


def _checked(job: EmbedJobSection) -> list[ModelSource]:
    """Check the names in a job, its input included, and resolve its models."""
    check_registered(job)
    store_location(DataSection(source=job.input), Path())  # raises DataError if the input does not exist
    return [check_model(model, job.random_weights, "--embed.models") for model in job.models]


def _finished(job: EmbedJobSection, output: Path, folders: list[str]) -> list[Index]:
    """Indexes of the finished output, one per model folder; empty if there is no output.

    Raises ConfigError if it belongs to other models.
    """
    pattern = MANIFEST_FILE if (output / MANIFEST_FILE).is_file() else f"*/{MANIFEST_FILE}"
    finished = {path.parent for path in output.glob(pattern)}
    if not finished:
        return []
    if finished != {output / folder for folder in folders}:
        raise other_job(job.output, "of other models", OTHER_OUTPUT)
    return [Index(f"{uri_of(job.output) or output}/{folder}".rstrip("/")) for folder in folders]


@contextmanager
def _computed(
    job: EmbedJobSection,
    ingest: IngestSection | None,
    cluster: RaySection | None,
    sources: Sequence[ModelSource],
    folders: Sequence[str],
    output: Path,
    before: Sequence[Index],
) -> Iterator[tuple[Path, list[ModelJob]]]:
    """Compute the missing shards of all models. Yield the folder of unfinished work and the models, to be assembled.

    ``before``: finished outputs, whose missing records are computed.
    """
    # A separate suffix, because an unfinished folder next to a finished output may belong to a job that will replace
    # it.
    suffix = ".grown" if before else ""
    uri = uri_of(job.output)
    shared = uri and f"{uri}{suffix}.partial"
    with (
        unfinished(output.with_name(f"{output.name}{suffix}"), MADE_BY, uri and f"{uri}{suffix}") as partial,
        _logging(partial),
        _connected(cluster, None if uri else partial),
    ):
        ShardFiles(partial, shared).fetch()
        job = _resolved(job, cluster, _recorded_precision(partial, before))
        store = job_store(job.input, ingest or IngestSection(), partial)
        works = [folder or "model" for folder in folders]
        if others := {path.parent.name for path in partial.glob(f"*/{JOB_FILE}")} - {*works}:
            raise other_job(partial, f"of model {min(others)}", REMEDY)
        indexes: Sequence[Index | None] = before or [None] * len(works)
        # All are checked before the first model loads, so that an id with a changed sequence costs nothing.
        models = [
            ModelJob(job, cluster, source, ShardFiles(partial / name, shared and f"{shared}/{name}"), store, index)
            for source, name, index in zip(sources, works, indexes, strict=True)
        ]
        # All models compute before the first is assembled, so that a rejected model costs no files.
        for model in models:
            model.compute()
        yield partial, models


def _add_part(model: ModelJob, logs: Path, output: Path, part: Path, uri: str | None) -> None:
    """Add the computed records to a finished output, as the folder ``part``. At a URI, upload it."""
    if not model.chosen.size:  # nothing new, or added by an earlier start
        return
    ready = model.folder.with_name(f"{model.folder.name}.part")
    # Overwritten, because an earlier start may have ended before the rename.
    with made_folder(ready, MADE_BY, overwrite=True) as building:
        model.assemble(building)
        shutil.copytree(logs, building / "logs")
    if uri is not None:  # the output is a copy, maybe with part of an interrupted upload
        shutil.rmtree(part, ignore_errors=True)
    # Open files never change: a part appears as a whole, at a URI when its manifest appears.
    with writing(part):
        ready.rename(part)
        sync(part.parent)
    if uri is not None:
        retried(
            lambda: upload_folder(part, f"{current(uri)}/{part.relative_to(output)}", MANIFEST_FILE),
            uri,
            storage().patience_s,
            log.warning,
        )


def _reports(job: EmbedJobSection, output: Path) -> list[dict[str, Any]]:
    """The reports of all parts of a finished output."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(output.glob(f"**/{report_name('*')}"))]
    if uri_of(job.output) is not None:  # a copy
        shutil.rmtree(output)
    return reports


def estimate(
    job: EmbedJobSection, ingest: IngestSection | None = None, *, cluster: RaySection | None = None
) -> list[str]:
    """Estimate size and time of a job from a measurement of ten seconds per model. All written files are removed."""
    sources = _checked(job)
    with tempfile.TemporaryDirectory() as folder, _connected(cluster):
        job = _resolved(job, cluster)
        store = job_store(job.input, ingest or IngestSection(), Path(folder))
        return [line for source in sources for line in _estimate(job, source, store)]


def _estimate(job: EmbedJobSection, source: ModelSource, store: Store) -> list[str]:
    from esmeray.inference.embedding.worker import open_worker  # imported here, because it loads torch

    worker = open_worker(source, job, store)
    facts = worker.facts
    check_settings(job, facts.outputs)
    plan = make_plan(store, job, facts.longest, outputs=facts.outputs)
    measured_flops = measured_tokens = 0.0
    start_s: float | None = None
    # Batches are sampled from the whole job: the first or the longest only would be faster or slower than the mean.
    random = np.random.default_rng(0)
    with status_line() as show:
        show(f"measuring {source.name}")
        while start_s is None or time.perf_counter() - start_s < MEASURED_S:
            shard = plan.shard(int(random.integers(plan.num_shards)))
            batches = shard.batches()
            first = int(random.integers(len(batches)))
            batch = np.concatenate(batches[first : first + worker.model.batches_at_once(shard.budget)])
            piece = shard._replace(records=shard.records[batch], lengths=shard.lengths[batch])
            worker.compute(piece)
            if start_s is None:  # the first batch is the warm-up
                start_s = time.perf_counter()
                continue
            measured_flops += facts.flops(piece.lengths, facts.outputs)
            measured_tokens += float(piece.lengths.sum())
    passed_s = time.perf_counter() - start_s
    # Based on FLOP instead of residues, because attention makes long sequences cost more per residue.
    seconds = facts.flops(plan.lengths, facts.outputs) / (measured_flops / passed_s) / (job.workers or 1)
    every_length = plan.lengths[plan.sequences]  # with duplicates, because most formats repeat their rows
    # Size of the outputs without ids.
    disk_bytes = sum(
        format_of(job, output).size(output.per, output.channels, job.dtype, every_length, plan.lengths)
        for output in facts.outputs
    )
    duplicates = plan.sequences.size - plan.num_sequences
    random_weights = " (random weights)" if facts.random_weights else ""
    return [
        f"{facts.name}{random_weights} on {facts.device_name}",
        f"  {counted(plan.sequences.size, 'protein{s}')}, {duplicates:,} duplicates, {plan.num_sequences:,} to embed",
        f"  {int(plan.lengths.sum()):,} residues, {plan.long_sequences:,} sequences above max_length",
        f"  {counted(plan.num_shards, 'shard{s}')}, batches of {plan.budget:,} tokens",
        f"  {disk_bytes / 1e9:.3g} GB on disk: {', '.join(output.name for output in facts.outputs)}",
        f"  {duration(seconds)} at {measured_tokens / passed_s:,.0f} residues/s, without start-up and writing",
    ]


def _connected(cluster: RaySection | None, shared: Path | None = None) -> AbstractContextManager[Any]:
    """Connect to Ray for the duration of a block, if a cluster computes."""
    if cluster is None:
        return nullcontext()
    from esmeray.cluster.connection import connected

    return connected(cluster, shared)


def _recorded_precision(partial: Path, before: Sequence[Index]) -> Any:
    """Precision of the unfinished work or finished output that a job continues; None if there is neither."""
    jobs = [read_json(path, REMEDY) for path in partial.glob(f"*/{JOB_FILE}")]
    jobs += [index.manifest.job for index in before]
    return jobs[0].get("settings", {}).get("precision") if jobs else None


def _resolved(job: EmbedJobSection, cluster: RaySection | None, recorded: Any = None) -> EmbedJobSection:
    """Resolve the job's device, workers and their defaults, from the cluster if there is one.

    ``recorded``: precision of the work that is continued, used if the job sets none.
    """
    nodes = local_resources()
    if cluster is not None:
        from esmeray.cluster import connection

        nodes = connection.cluster_resources()
    gpus = sum(node.gpus for node in nodes)
    # Chosen here instead of by each worker: the job's identity names the device, and all workers must use one kind.
    device = job.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ResourceError("--embed.device cuda: no GPU found; use cpu")
    shares = gpus / job.gpus_per_worker if device == "cuda" else sum(node.cpus for node in nodes)
    workers = 1 if cluster is None else job.workers or max(1, int(shares))
    precision = job.precision or recorded
    if precision is None and cluster is not None:
        precision = connection.default_precision(device == "cuda")
    job = job.model_copy(update={"precision": precision})
    return job.model_copy(update={**job.resolved(device == "cuda")._asdict(), "device": device, "workers": workers})


@contextmanager
def _logging(folder: Path) -> Iterator[None]:
    """Log to a file in the unfinished folder, named by the time."""
    with writing(folder):
        (folder / "logs").mkdir(exist_ok=True)
        name = f"embed-{datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}.log"
    with logged_to(folder / "logs" / name, "%(asctime)s %(levelname)s %(message)s"):
        try:
            yield
        except BaseException as error:  # interruptions too, so that the log shows why the job ended
            log.error("ended: %s: %s", type(error).__name__, error)
            raise
