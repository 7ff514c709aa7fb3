"""The service on loopback, under load from another process: throughput and latency.

ESM-2 8M in bf16 on one core; proxy, ingress and load share the other. Requests have eight sequences with the lengths of
real proteins and get .npy answers; nothing is cached. It is compared with the offline forward pass of the same
sequences on one core and, if its command is on the path, with infinity-emb with the same weights and all cores (0.0.78
needs another version of transformers: install it in an environment of its own).

Latency is measured with the same requests at even times, at half the rate that saturates the service.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness.comparison import compare
from benchmarks.harness.inputs import read_proteins, require_agreement, spread_by_length
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from benchmarks.peers.transformers_embedding import write_model
from benchmarks.programs.processes import call
from benchmarks.programs.service import Load, Outcome, answered, free_port, server, service
from esmeray.common.timing import timed
from esmeray.inference.models.opening import open_model
from esmeray.service.client import Client

PROTEINS, TOGETHER = 960, 8
MAX_WAIT_MS = 2.0
OURS, OFFLINE, INFINITY = "esmeray service", "esmeray offline, one core", "infinity-emb"
ENCODE = "/v1/encode"
LIMIT = "3 times the unloaded median + wait"


def _rows(setting: Setting) -> Iterator[Row]:
    sequences = spread_by_length(read_proteins(setting), 48 if setting.quick else PROTEINS)
    random.Random(0).shuffle(sequences)  # otherwise neighbours in the file, often alike, would share a request
    folder = write_model(setting.folder / "esm2_t6_8M", "esm2_t6_8M")
    groups = [sequences[start : start + TOGETHER] for start in range(0, len(sequences), TOGETHER)]
    bodies = [json.dumps({"sequences": group}) for group in groups]
    setting.facts.update({"sequences": len(sequences), "residues": sum(map(len, sequences))})
    model = {
        "name": "esm2",
        "source": folder,
        "precision": "bf16",
        "cache_mb": 0,  # requests repeat the same sequences
        "max_wait_ms": MAX_WAIT_MS,
        "queue_tokens": 60_000,  # a few seconds of work
    }
    infinity = shutil.which("infinity_emb")
    port = free_port()
    options = ["--model-id", folder, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    options += ["--no-bettertransformer", "--no-model-warmup", "--batch-size", "16"]
    peer = server([infinity, "v2", *options], port, "/health") if infinity else nullcontext()
    with service(setting.folder, model) as (address, _), peer:
        check_answers(address, folder)
        contenders = {
            OURS: partial(_saturated, Load(address + ENCODE, bodies, "application/x-npy")),
            OFFLINE: partial(call, f"{__name__}:embedded_per_s", folder=folder, sequences=sequences),
        }
        if infinity:
            as_openai = {"model": Path(folder).name, "encoding_format": "base64"}
            texts = [json.dumps({**as_openai, "input": group}) for group in groups[:24]]
            contenders[INFINITY] = partial(_saturated, Load(f"http://127.0.0.1:{port}/embeddings", texts, "*/*"))
        floors = {OFFLINE: 0.85, INFINITY: 1.0}
        yield from compare(setting, "saturated throughput", "sequences/s", contenders, floors)
        load = Load(address + ENCODE, bodies, "application/x-npy", requests=len(bodies))
        rate = len(bodies) / _answered(load).seconds
        setting.facts["saturating rate, sequences/s"] = round(TOGETHER * rate, 1)
        latencies: dict[str, Callable[[], float]] = {
            "p99 at half load": lambda: _answered(replace(load, rate=rate / 2)).percentile_ms(99),
            LIMIT: partial(_limit_ms, load),
        }
        yield from compare(setting, "latency", "ms", latencies, {LIMIT: 1.0}, "lower")


def _answered(load: Load) -> Outcome:
    outcome = answered(load)
    # With a rate some requests may be rejected. A closed loop leaves no reason to reject any.
    if load.rate is None and set(outcome.statuses) != {200}:
        raise WrongWorkError(f"{load.url}: answers {set(outcome.statuses)}")
    return outcome


def _saturated(load: Load) -> float:
    """Return the sequences per second of a closed loop, after an eighth of it to warm up."""
    _answered(replace(load, requests=max(1, len(load.bodies) // 8)))
    outcome = _answered(replace(load, requests=len(load.bodies)))
    return TOGETHER * len(outcome.statuses) / outcome.seconds


def embedded_per_s(folder: str, sequences: list[str]) -> float:
    """Return the sequences per second of the forward pass alone, on one core."""
    torch.set_num_threads(1)  # as the service's model has one core, and proxy and load the other
    model = open_model(folder, "bf16", "cpu", heads=[])
    model.embed(sequences)  # to warm up
    return len(sequences) / timed(partial(model.embed, sequences))[1]


def check_answers(address: str, folder: str) -> None:
    """Raise WrongWorkError if the answers differ from the offline forward pass."""
    texts = ["MKTAYIAKQR", "MSILVTRPSPAGEEL" * 20, "MQIFVKTLTGKTITLEVEPS"]
    offline = np.asarray(open_model(folder, "bf16", "cpu", heads=[]).embed(texts))
    with Client(address) as client:
        require_agreement(OFFLINE, {OURS: np.asarray(client.embed(texts)), OFFLINE: offline})


def _limit_ms(load: Load) -> float:
    alone = replace(load, connections=1, requests=max(1, load.requests // 2))
    return 3 * _answered(alone).percentile_ms(50) + MAX_WAIT_MS


STAGE = Stage(
    name="service",
    summary="HTTP on loopback: throughput and latency",
    rows=_rows,
    packages=("transformers",),
    distributions=("ray", "fastapi", "uvicorn"),
)
