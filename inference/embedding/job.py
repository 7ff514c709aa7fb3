"""An embedding job: from FASTA files or a store to a folder of embeddings, resumable at any moment.

In: models, sources, settings, an output folder. Out: the folder, complete under its name, or not there. Until then
everything lies in ``OUTPUT.partial``: the store, ``job.json`` of each model with what the job depends on, the shards
that are done, the log. The same command resumes there; one with another input, model or settings is refused.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.placement import local_resources
from common.errors import ConfigError, ResourceError
from common.progress import status_line
from common.publishing import made_folder, refuse_existing, writing
from dataset.embeddings.manifest import MANIFEST_FILE, read_manifest
from dataset.store.conversion import open_store
from inference.embedding.model_job import ModelJob
from inference.embedding.report import report_name
from inference.embedding.request import JobRequest
from run_folder.job import JOB_FILE, other_job, unfinished

log = logging.getLogger(__name__)

MADE_BY = "embed"
_ONE_MODEL = "model"
"""Folder of the shards of a job's only model."""


def run_job(request: JobRequest) -> list[dict[str, Any]]:
    """Compute what is missing, publish the folder, return the report of each model.

    Raises ConfigError where the unfinished or finished output is another job's, DataError where sequences or weights
    can't be taken, ResourceError where disk, memory or workers don't suffice.
    """
    names = [request.folder_name(model) for model in request.models]
    if len(set(names)) < len(names):
        raise ConfigError("--embed.models: two of them have the same name, and would share a folder; rename one")
    complete = [read_manifest(path.parent) for path in request.output.glob(f"**/{MANIFEST_FILE}")]
    if request.overwrite or not complete:
        refuse_existing(request.output, MADE_BY, request.overwrite)
        complete = []
    with unfinished(request.output) as partial, _logging(partial), ExitStack() as stack:
        if request.cluster is not None:
            from cluster.connection import connected

            stack.enter_context(connected(request.cluster))
        request = resolved(request)
        store = open_store(request.sources, request.ingest, request.partial)
        folders = names if len(names) > 1 else [_ONE_MODEL]
        if others := {path.parent.name for path in request.partial.glob(f"*/{JOB_FILE}")} - {*folders}:
            raise other_job(
                request.partial, f"of model {min(others)}", "choose another --output, or remove this folder"
            )
        models = [ModelJob(request, model, name, store) for model, name in zip(request.models, folders, strict=True)]
        for model in models:
            model.compute([manifest.job for manifest in complete])
        if complete:
            reports = sorted(request.output.glob(f"**/{report_name('*')}"))
            return [json.loads(path.read_text(encoding="utf-8")) for path in reports]
        return _publish(request, models)


def resolved(request: JobRequest) -> JobRequest:
    """The request with its device and workers chosen, from the cluster where there is one."""
    nodes = local_resources()
    if request.cluster is not None:
        from cluster.connection import cluster_resources

        nodes = cluster_resources()
    device = request.device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    if device == "cuda" and not any(node.gpus for node in nodes):
        raise ResourceError("--embed.device cuda: there is no GPU here; use cpu")
    share = request.gpus_per_worker if device == "cuda" else request.cpus_per_worker
    available = sum((node.gpus if device == "cuda" else node.cpus) for node in nodes)
    workers = request.workers or max(1, int(available / share)) if request.cluster is not None else 1
    return replace(request, device=device, workers=workers, settings=request.settings.resolved(device == "cuda"))


def _publish(request: JobRequest, models: list[ModelJob]) -> list[dict[str, Any]]:
    with made_folder(request.output, MADE_BY, request.overwrite) as building, status_line() as show:
        reports = []
        for model in models:
            folder = building if len(models) == 1 else building / model.name
            folder.mkdir(exist_ok=True)
            reports.append(model.assemble(folder, show))
        shutil.copytree(request.partial / "logs", building / "logs")
    shutil.rmtree(request.partial)
    return reports


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
