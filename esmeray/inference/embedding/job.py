"""An embedding job: from FASTA files or a store to a folder of embeddings, resumable at any moment; or its estimate.

The folder is complete under its name, or not there. Until then everything lies in ``OUTPUT.partial``: the store,
``job.json`` of each model with what the job depends on, the shards that are done, the log. The same command resumes
there; one with another input, model or settings is refused. A finished folder grows by a part, a folder in it, of the
records of the input that it lacks; until the part is complete, everything lies in ``OUTPUT.grown.partial``.
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
from functools import partial as partial_call
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
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.model_job import OTHER_OUTPUT, ModelJob
from esmeray.inference.embedding.plan import check_registered, check_settings, format_of, make_plan
from esmeray.inference.embedding.report import report_name
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.embedding.shard_files import ShardFiles
from esmeray.inference.embedding.worker import open_worker
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
    """Compute what is missing, publish the folder, or the part by which it grows; return the reports of each model.

    ``cluster``: of Ray, whose actors compute; None for this process. Raises ConfigError where the unfinished or
    finished output is another job's, DataError where sequences or weights can't be taken, an id has another sequence
    in the finished output among them, ResourceError where disk, memory or workers don't suffice.
    """
    check_registered(job)
    # What names a folder on any file system, and in a URI.
    names = [re.sub(r"[^\w.+-]+", "_", Path(model).name or model) for model in job.models]
    if len(set(names)) < len(names):
        raise ConfigError("--embed.models: two of them have the same name, and would share a folder; rename one")
    uri = uri_of(job.output)
    output = target_path(job.output)
    recover(output)
    # Of one model the output is its folder: a second model is another job, so that none has to be moved.
    folders = names if len(names) > 1 else [""]
    before = [] if overwrite else _finished(job, output, folders)
    if not before:
        refuse_existing(output, MADE_BY, overwrite)
    # Apart: what is unfinished beside a finished output may be of one that is to replace it.
    suffix = ".grown" if before else ""
    shared = uri and f"{uri}{suffix}.partial"
    with (
        unfinished(output.with_name(f"{output.name}{suffix}"), MADE_BY, uri and f"{uri}{suffix}") as partial,
        _logging(partial),
        _connected(cluster, None if uri else partial),
    ):
        if shared is not None:
            ShardFiles(partial, shared).fetch()
        job = _resolved(job, cluster, _recorded_precision(partial, before))
        store = job_store(job.input, ingest or IngestSection(), partial)
        works = [folder or "model" for folder in folders]
        if others := {path.parent.name for path in partial.glob(f"*/{JOB_FILE}")} - {*works}:
            raise other_job(partial, f"of model {min(others)}", REMEDY)
        # All before the first loads its model: an id that has another sequence by now costs nothing.
        indexes: Sequence[Index | None] = before or [None] * len(works)
        models = [
            ModelJob(job, cluster, model, ShardFiles(partial / name, shared and f"{shared}/{name}"), store, index)
            for model, name, index in zip(job.models, works, indexes, strict=True)
        ]
        # One after the other, all before the first is assembled: a model that is refused costs no files.
        for model in models:
            model.compute()
        if before:
            return _grown(models, partial, [output / folder for folder in folders], uri)
        with made_folder(output, MADE_BY, overwrite) as building:
            reports = []
            for model, folder in zip(models, folders, strict=True):
                (building / folder).mkdir(exist_ok=True)
                reports.append(model.assemble(building / folder))
            shutil.copytree(partial / "logs", building / "logs")
        # Inside the unfinished folder's block: it goes only once the URI has all.
        publish(job.output)
        return reports


def _finished(job: EmbedJobSection, output: Path, folders: list[str]) -> list[Index]:
    """The finished output of each model in its folder; none where there is no output.

    Raises ConfigError where it is of other models.
    """
    pattern = MANIFEST_FILE if (output / MANIFEST_FILE).is_file() else f"*/{MANIFEST_FILE}"
    finished = {path.parent for path in output.glob(pattern)}
    if not finished:
        return []
    if finished != {output / folder for folder in folders}:
        raise other_job(job.output, "of other models", OTHER_OUTPUT)
    return [Index(f"{uri_of(job.output) or output}/{folder}".rstrip("/")) for folder in folders]


def _grown(models: list[ModelJob], partial: Path, folders: list[Path], uri: str | None) -> list[dict[str, Any]]:
    """Add what was computed to the finished folder of each model; the reports of all that is there by then."""
    output = folders[0] if len(folders) == 1 else folders[0].parent
    for model, folder in zip(models, folders, strict=True):
        if model.before is None or not model.chosen.size:  # no record is new, or an earlier start ended after this one
            continue
        part = folder / part_name(len(model.before.parts))
        ready = model.folder.with_name(f"{model.folder.name}.part")
        # Overwritten: an earlier start may have ended before it was renamed.
        with made_folder(ready, MADE_BY, overwrite=True) as building:
            model.assemble(building)
            shutil.copytree(partial / "logs", building / "logs")
        if uri is not None:  # there the folder is a copy, maybe with the start of an upload that was cut short
            shutil.rmtree(part, ignore_errors=True)
        # Nothing that a reader has open changes: a part is there as a whole or not at all, at a URI by its manifest.
        with writing(part):
            ready.rename(part)
            sync(folder)
        if uri is not None:
            upload = partial_call(upload_folder, part, f"{current(uri)}/{part.relative_to(output)}", MANIFEST_FILE)
            retried(upload, uri, storage().patience_s, log.warning)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(output.glob(f"**/{report_name('*')}"))]
    if uri is not None:
        shutil.rmtree(output)
    return reports


def estimate(
    job: EmbedJobSection, ingest: IngestSection | None = None, *, cluster: RaySection | None = None
) -> list[str]:
    """Lines on size and time of a job, after a measurement of ten seconds for each model; nothing that is written
    stays."""
    check_registered(job)
    with tempfile.TemporaryDirectory() as folder, _connected(cluster):
        job = _resolved(job, cluster)
        store = job_store(job.input, ingest or IngestSection(), Path(folder))
        return [line for model in job.models for line in _estimate(job, model, store)]


def _estimate(job: EmbedJobSection, source: str, store: Store) -> list[str]:
    worker = open_worker(source, job, store)
    facts = worker.facts
    check_settings(job, facts.outputs)
    plan = make_plan(store, job, facts.longest)
    measured_flops = measured_tokens = 0.0
    start_s: float | None = None
    # Batches of the job itself, drawn over all of it: the longest alone, or the first, would be slower or faster.
    random = np.random.default_rng(0)
    with status_line() as show:
        show(f"measuring {source}")
        while start_s is None or time.perf_counter() - start_s < MEASURED_S:
            shard = plan.shard(int(random.integers(plan.num_shards)))
            batches = shard.batches()
            first = int(random.integers(len(batches)))
            batch = np.concatenate(batches[first : first + worker.model.batches_at_once(shard.budget)])
            piece = shard._replace(records=shard.records[batch], lengths=shard.lengths[batch])
            worker.compute(piece)
            if start_s is None:  # the first warms up
                start_s = time.perf_counter()
                continue
            measured_flops += facts.flops(piece.lengths)
            measured_tokens += float(piece.lengths.sum())
    passed_s = time.perf_counter() - start_s
    # By FLOP, not by residues: a long sequence costs more for each, as attention grows with the square.
    seconds = facts.flops(plan.lengths) / (measured_flops / passed_s) / (job.workers or 1)
    every_length = plan.lengths[plan.sequences]  # duplicates too: most formats repeat their rows
    # Of the outputs, without ids.
    disk_bytes = sum(
        format_of(job, output).size(output.per, output.channels, job.dtype, every_length, plan.lengths)
        for output in facts.outputs
    )
    duplicates = plan.sequences.size - plan.num_sequences
    random_weights = " (random weights)" if facts.random_weights else ""
    return [
        f"{facts.name}{random_weights} on {facts.device_name}",
        f"  {counted(plan.sequences.size, 'protein{s}')}, {duplicates:,} duplicates, {plan.num_sequences:,} to compute",
        f"  {int(plan.lengths.sum()):,} residues, {plan.long_sequences:,} sequences longer than the limit",
        f"  {counted(plan.num_shards, 'shard{s}')}, batches of {plan.budget:,} tokens",
        f"  {disk_bytes / 1e9:.3g} GB on disk: {', '.join(output.name for output in facts.outputs)}",
        f"  {duration(seconds)} at {measured_tokens / passed_s:,.0f} residues/s, beside start and writing",
    ]


def _connected(cluster: RaySection | None, shared: Path | None = None) -> AbstractContextManager[Any]:
    """Ray for the time of a block, where a cluster computes."""
    if cluster is None:
        return nullcontext()
    from esmeray.cluster.connection import connected

    return connected(cluster, shared)


def _recorded_precision(partial: Path, before: list[Index]) -> Any:
    """Precision of the unfinished work or the finished output that a job continues; None if there is neither."""
    jobs = [read_json(path, REMEDY) for path in partial.glob(f"*/{JOB_FILE}")]
    jobs += [index.manifest.job for index in before]
    return jobs[0].get("settings", {}).get("precision") if jobs else None


def _resolved(job: EmbedJobSection, cluster: RaySection | None, recorded: Any = None) -> EmbedJobSection:
    """The job with its device and workers chosen, from the cluster where there is one, and the defaults of these.

    ``recorded``: precision of the work that is continued, which counts if none is given.
    """
    nodes = local_resources()
    if cluster is not None:
        from esmeray.cluster import connection

        nodes = connection.cluster_resources()
    gpus = sum(node.gpus for node in nodes)
    # Decided here, not by each worker: the job's identity names the device, and all must compute on one kind.
    device = job.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ResourceError("--embed.device cuda: there is no GPU here; use cpu")
    shares = gpus / job.gpus_per_worker if device == "cuda" else sum(node.cpus for node in nodes) / job.cpus_per_worker
    workers = 1 if cluster is None else job.workers or max(1, int(shares))
    precision = job.precision or recorded
    if precision is None and cluster is not None:
        precision = connection.default_precision(device == "cuda")
    job = job.model_copy(update={"precision": precision})
    return job.model_copy(update={**job.resolved(device == "cuda")._asdict(), "device": device, "workers": workers})


@contextmanager
def _logging(folder: Path) -> Iterator[None]:
    """A log file named by the time, in the unfinished folder."""
    with writing(folder):
        (folder / "logs").mkdir(exist_ok=True)
        name = f"embed-{datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}.log"
    with logged_to(folder / "logs" / name, "%(asctime)s %(levelname)s %(message)s"):
        try:
            yield
        except BaseException as error:  # an interruption too: the log of a job that ended says why
            log.error("ended: %s: %s", type(error).__name__, error)
            raise
