"""The service in this process: small models, and real uvicorn servers on 127.0.0.1 that share one event loop."""

import asyncio
import io
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import uvicorn

from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.inference.embedding.job import run_job
from esmeray.inference.index.build import IndexSection, make_index
from esmeray.model.export.backbone import export
from esmeray.service.http.app import build_app
from esmeray.service.http.guard import Guard
from esmeray.service.http.models import Call, Models
from esmeray.service.http.protocol import LimitedProtocol
from esmeray.service.replicas.index_replica import IndexReplica
from esmeray.service.replicas.replica import ModelReplica
from esmeray.service.section import ServedIndex, ServedModel, ServeSection
from esmeray.tasks.diffusion.model import SequenceDiffusion
from tests.classifiers import classifier_config, export_tiny
from tests.dataset.tokenizer_folders import esm
from tests.inference.embedding.jobs import request, write_proteins
from tests.model.small_models import save_masked_lm
from tests.model.support import build_model, random_sequences, tiny_section
from tests.structures import TINY_DIFFUSION

Result = TypeVar("Result")
BATCH_TOKENS = 128
PRECISION: dict[str, Any] = {"precision": "fp32", "tokens": BATCH_TOKENS}
LIMITS = {"sequences": 50, "sequence_residues": 400, "residues": 2000, "mutations": 8, "body_bytes": 200_000}


class LostError(Exception):
    """Error of a call whose replica was lost."""


def save_models(folder: Path) -> list[ServedModel]:
    """Save a masked language model, an autoencoder, a protein and a residue classifier, and a sequence diffusion."""
    save_masked_lm(esm(folder / "esm"), "esm", vocab_size=33)
    export(build_model(tiny_section(), 4), folder / "autoencoder", EsmSequenceTokenizer())
    export_tiny(folder / "places", classifier_config(crop="ends"))
    export_tiny(folder / "helices", classifier_config("per_residue"))
    export(SequenceDiffusion.build(TINY_DIFFUSION, 0), folder / "folds", EsmSequenceTokenizer())
    names = ("esm", "autoencoder", "places", "helices", "folds")
    return [ServedModel(name=name, source=str(folder / name), **PRECISION) for name in names]


def save_index(folder: Path, model: Path) -> Path:
    """Build an index of forty proteins embedded by the model; the first ids are UniProt accessions."""
    folder.mkdir()
    proteins = write_proteins(folder / "proteins.fasta", random_sequences(range(10, 50), seed=7))
    run_job(request(folder, models=[str(model)], input=[str(proteins)], output=folder / "vectors"))
    make_index([folder / "vectors"], IndexSection(output=folder / "index"))
    return folder / "index"


class Serving:
    """The models, and an event loop in a thread for the servers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.models = folder, save_models(folder)
        replicas = {model.name: ModelReplica(model.model_dump(), "cpu", "1") for model in self.models}
        self.index = save_index(folder / "proteins", folder / "esm")
        served = ServedIndex(name="proteins", source=str(self.index), link="https://example.org/{id}/page")
        self.index_replica = IndexReplica(served.model_dump(), "esm", "1")
        self.index_calls = {"proteins": Call(self.index_replica.about, self.index_replica.run)}
        self.calls = {name: Call(replica.about, replica.run, replica.tokens) for name, replica in replicas.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def app(self, calls: dict[str, Call] | None = None, **config: Any) -> Guard:
        """The application of all models, or of these calls; ``limits`` override the tests' default limits."""
        settings = ServeSection(models=self.models, **{**config, "limits": {**LIMITS, **config.get("limits", {})}})
        return build_app(settings, Models(calls or self.calls, (LostError,), (), self.index_calls))

    @contextmanager
    def address(self, app: Any) -> Iterator[str]:
        """Run a uvicorn server of the application while the block runs; yield its address."""
        # uvicorn closes connections that are idle for 5 s; on a busy machine a client may be sending at that time.
        waits = {"timeout_graceful_shutdown": 5, "timeout_keep_alive": 600}
        how: dict[str, Any] = {"http": LimitedProtocol, "log_config": None, "lifespan": "off", **waits}
        server = uvicorn.Server(uvicorn.Config(app, **how))
        # With another proto, asyncio does not set TCP_NODELAY: delays of 40 ms.
        with socket.socket(proto=socket.IPPROTO_TCP) as listening:
            listening.bind(("127.0.0.1", 0))
            ended = asyncio.run_coroutine_threadsafe(server.serve([listening]), self._loop)
            while not server.started:
                time.sleep(0.005)
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True
                ended.result(30)

    @contextmanager
    def client(self, calls: dict[str, Call] | None = None, **config: Any) -> Iterator[httpx.Client]:
        """Run a server with these settings while the block runs; yield a client of it."""
        with self.address(self.app(calls, **config)) as address, httpx.Client(base_url=address, timeout=60) as client:
            yield client

    def close(self) -> None:
        """End the loop and its tasks."""

        async def cancelled() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancelled())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def npy(array: Any) -> bytes:
    """Bytes of the file that np.save writes."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def eventually(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def problem(answer: httpx.Response, status: int) -> str:
    """Check the form of a refusal and return its detail."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json" and len(answer.content) <= 4096
    body = answer.json()
    assert (body["type"], body["status"]) == ("about:blank", status) and body["title"]
    assert body["request_id"] == answer.headers["x-request-id"]
    detail: str = body["detail"]
    return detail
