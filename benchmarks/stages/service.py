"""The service on loopback, under load from another process: throughput, latency, overload, lost replicas.

ESM-2 8M in bf16 on one core; proxy, ingress and load share the other. Requests have eight sequences of the lengths of
real proteins and get .npy answers; nothing is cached. Beside it the offline forward pass of the same sequences on one
core, a FastAPI server around transformers that answers one request at a time (fp32, padded, JSON), infinity-emb with
the same weights where its command is on the path (0.0.78 wants another version of transformers: give it an environment
of its own); both have all cores.

Latency is of the same requests at half the rate that saturates the service, at even times. At random times (Poisson)
a single server with one duration for all has a 99th percentile of 4.3 durations at half load, whatever it is; it is
measured beside. Twice the saturating rate, of requests with one sequence, shows overload: what is refused, the latency
of what is accepted, memory. Then the model's replica is killed again and again under load, and the weights are changed.
Counts are among the facts of each case.
"""

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.models import our_embedder, random_network, save_weights
from benchmarks.harness.proteins import read_proteins, spread_by_length
from benchmarks.harness.stage import (
    Case,
    Comparison,
    Contender,
    Facts,
    Reference,
    Setting,
    Stage,
    WrongWorkError,
)
from benchmarks.programs.http_load import Load, Outcome, begun_load
from benchmarks.programs.processes import call
from benchmarks.programs.servers import REPLICA, free_port, serve_processes, server, service, service_bytes
from esmeray.common.timing import timed
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.service.client import Client

PROTEINS, TOGETHER, CONNECTIONS = 960, 8, 16
LONG = 35_000
SOAK_S, KILLS = 600.0, 10
MAX_WAIT_MS = 2.0

OURS, OFFLINE, PLAIN = "esmeray service", "esmeray offline, one core", "FastAPI and transformers"
INFINITY = "infinity-emb"
BUSY, RANDOM = "p99 at half load", "p99 at half load, random arrivals"
LIMIT = "3 times the unloaded median + wait"
DELAY, OWN_BATCH = "longest delay of a short request", "the long one alone"
ACCEPTED, BOUND = "p99 of accepted requests", Reference("10 s", 10_000.0)
FAILED, ALLOWED = "requests not answered", Reference("0.1 % of requests", 0.1)
THROUGHPUT, LATENCY, LONG_CASE = "saturated throughput", "latency", "one sequence of 35,000 residues"
OVERLOAD, LOST = "twice the saturating rate", "a replica killed ten times"


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    sequences = spread_by_length(proteins.sequences, 48 if setting.quick else PROTEINS)
    random.Random(0).shuffle(sequences)  # else neighbours in the file, often alike, would share a request
    folder = save_weights(random_network("esm2_t6_8M"), setting.folder / "esm2_t6_8M")
    EsmSequenceTokenizer().save(folder)
    groups = [sequences[start : start + TOGETHER] for start in range(0, len(sequences), TOGETHER)]
    bodies = [json.dumps({"sequences": group}) for group in groups]
    singles = [json.dumps({"sequences": [text]}) for text in sequences]
    facts: Facts = {**proteins.facts, "sequences": len(sequences), "residues": sum(map(len, sequences))}
    model = {
        "name": "esm2",
        "source": str(folder),
        "precision": "bf16",
        "cache_mb": 0,  # the same sequences come again and again
        "max_wait_ms": MAX_WAIT_MS,
        "queue_tokens": 60_000,  # a few seconds of work: what is accepted beyond them would be answered too late
    }

    def load(address: str, bodies: Sequence[str], path: str = "/v1/encode", **how: Any) -> Outcome:
        accept = "application/x-npy" if path == "/v1/encode" else "*/*"
        with begun_load(Load(address + path, bodies, accept, **how)) as result:
            outcome = result()
        # At a rate some may be refused, which is a result; in a closed loop nothing has a reason to be.
        if how.get("rate") is None and set(outcome.counts) != {200}:
            raise WrongWorkError(f"{address}: answers {dict(outcome.counts)}")
        return outcome

    def saturated(address: str, bodies: Sequence[str], path: str = "/v1/encode") -> float:
        return TOGETHER * len(load(address, bodies, path, connections=CONNECTIONS, requests=len(bodies)).statuses)

    with ExitStack() as servers:
        address, _ = servers.enter_context(service(setting.folder, model))
        offline = partial(call, f"{__name__}:embedded_per_s", folder=str(folder), sequences=sequences)
        contenders = [
            Contender(OURS, partial(saturated, address, bodies), short=partial(saturated, address, bodies[:8])),
            Contender(OFFLINE, offline, "value"),
        ]
        for label, peer, path, peer_bodies in _peers(folder, groups, servers):
            measure = partial(saturated, peer, peer_bodies, path)
            contenders.append(Contender(label, measure, short=measure))
        yield Case(
            THROUGHPUT, "sequences/s", tuple(contenders), rounds=3, check=partial(_same, address, folder), facts=facts
        )
    with service(setting.folder, model) as (address, _):
        whole = load(address, bodies, connections=CONNECTIONS, requests=len(bodies))
        saturating = len(bodies) * TOGETHER / whole.seconds
        facts = {**facts, "saturating rate, sequences/s": round(saturating, 1)}
        rate = saturating / TOGETHER / 2

        def unloaded() -> float:
            return 3 * load(address, bodies, connections=1, requests=len(bodies) // 2).percentile_ms(50) + MAX_WAIT_MS

        def half(even: bool) -> float:
            return load(address, bodies, rate=rate, requests=len(bodies), even=even).percentile_ms(99)

        limits = (
            Contender(BUSY, partial(half, True), "value"),
            Contender(RANDOM, partial(half, False), "value"),
            Contender(LIMIT, unloaded, "value"),
        )
        yield Case(LATENCY, "ms", limits, better="lower", rounds=3, facts=facts)
        yield _long_case(setting, address, load, singles, facts)
        yield _overload_case(setting, address, singles, saturating, facts)
    yield _lost_case(setting, model, bodies, facts)


def _peers(
    folder: Path, groups: Sequence[Sequence[str]], servers: ExitStack
) -> Iterator[tuple[str, str, str, list[str]]]:
    """Name, address, path and bodies of the other servers, started one after the other."""
    # All stay up while all are measured in turns: a server that is idle takes next to nothing of a core.
    port = free_port()
    servers.enter_context(
        server([sys.executable, "-m", "benchmarks.peers.fastapi_server", str(folder), str(port)], port)
    )
    yield PLAIN, f"http://127.0.0.1:{port}", "/embed", [json.dumps({"sequences": group}) for group in groups[:12]]
    # Another version of transformers keeps it out of this environment, so it is no package that a run asks for.
    infinity = shutil.which("infinity_emb")
    if infinity is None:
        return
    port = free_port()
    options = ["--model-id", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    options += ["--no-bettertransformer", "--no-model-warmup", "--batch-size", "16"]
    servers.enter_context(server([infinity, "v2", *options], port, "/health"))
    as_openai = {"model": folder.name, "encoding_format": "base64"}
    bodies = [json.dumps({**as_openai, "input": group}) for group in groups[:24]]
    yield INFINITY, f"http://127.0.0.1:{port}", "/embeddings", bodies


def embedded_per_s(folder: str, sequences: list[str]) -> float:
    """Sequences a second of the forward pass alone, on one core."""
    torch.set_num_threads(1)  # as the service's model has one core, and proxy and load the other
    embedder = our_embedder(Path(folder), "cpu", "bf16")
    embedder(sequences)  # to warm up
    return len(sequences) / timed(partial(embedder, sequences))[1]


def _same(address: str, folder: Path) -> Facts:
    """Hold answers to those of the offline forward pass."""
    texts = ["MKTAYIAKQR", "MSILVTRPSPAGEEL" * 20, "MQIFVKTLTGKTITLEVEPS"]
    with Client(address) as client:
        ours = np.asarray(client.embed(texts))
    difference = float(np.abs(ours - our_embedder(folder, "cpu", "bf16")(texts).numpy()).max())
    if not difference <= 0.05:  # bf16, and batches of other lengths: sums are rounded in another order
        raise WrongWorkError(f"answers differ from the offline embeddings by {difference}")
    return {"largest difference to the offline embeddings, bf16": round(difference, 5)}


def _long_case(setting: Setting, address: str, load: Any, singles: Sequence[str], facts: Facts) -> Case:
    """Short requests while one of 35,000 residues is computed."""
    length = 500 if setting.quick else LONG
    text = json.dumps({"sequences": ["".join(random.Random(1).choices("ACDEFGHIKLMNPQRSTVWY", k=length))]})

    def alone() -> float:
        return load(address, [text], connections=1, requests=1).percentile_ms(100)

    def delayed() -> float:
        short = Load(f"{address}/v1/encode", singles, connections=2, seconds=30, requests=500)
        with begun_load(short) as outcome:
            time.sleep(3)  # until the short ones are answered steadily
            load(address, [text], connections=1, requests=1)
            return outcome().percentile_ms(100)

    contenders = Contender(DELAY, delayed, "value"), Contender(OWN_BATCH, alone, "value")
    return Case(LONG_CASE, "ms", contenders, better="lower", rounds=1, facts=facts)


def _overload_case(setting: Setting, address: str, singles: Sequence[str], saturating: float, facts: Facts) -> Case:
    """Ten minutes of twice what can be answered."""
    facts = dict(facts)
    seconds = 6.0 if setting.quick else SOAK_S

    def soak() -> float:
        twice = Load(f"{address}/v1/encode", singles, "application/x-npy", rate=2 * saturating, seconds=seconds)
        with begun_load(twice) as result:
            time.sleep(seconds / 10)  # buffers and queues are full by then: what grows from here on is a leak
            after_a_minute = service_bytes()
            time.sleep(0.85 * seconds)
            facts["memory after a minute, MB"] = round(after_a_minute / 1e6)
            facts["memory at the end, relative"] = round(service_bytes() / after_a_minute, 3)
            outcome = result()
        facts.update({"seconds": round(outcome.seconds), "requests": len(outcome.statuses)})
        facts["answers by status"] = outcome.by_status
        return outcome.percentile_ms(99)

    return Case(OVERLOAD, "ms", (Contender(ACCEPTED, soak, "value"),), better="lower", rounds=1, facts=facts)


def _lost_case(setting: Setting, model: dict[str, Any], bodies: Sequence[str], facts: Facts) -> Case:
    """Requests while the model's replica is killed, and while its weights are changed."""
    facts = dict(facts)
    kills = 1 if setting.quick else KILLS

    def killed() -> float:
        with service(setting.folder, {**model, "replicas": 2}) as (address, serving):
            load = Load(f"{address}/v1/encode", bodies, "application/x-npy", connections=4, seconds=20.0 * kills + 10)
            with begun_load(load) as result:
                for _ in range(kills):
                    time.sleep(20)  # Ray Serve has started another by then
                    serve_processes(REPLICA)[0].send_signal(signal.SIGKILL)
                outcome = result()
            # Beside the one that was killed is another: what fails was on the way in the lost one.
            failed = sum(count for status, count in outcome.counts.items() if status != 200)
            facts["requests, kills"] = len(outcome.statuses)
            facts["answers by status, kills"] = outcome.by_status
            facts["503 without Retry-After"] = outcome.unexplained
            before = {replica.pid for replica in serve_processes(REPLICA)}
            with begun_load(replace(load, seconds=60.0)) as result:
                time.sleep(3)
                Path(str(model["source"]), "changed").write_text("a file more is another version of the weights")
                serving.send_signal(signal.SIGHUP)
                facts["answers by status, rolling update"] = result().by_status
            facts["replicas replaced by the update"] = len({p.pid for p in serve_processes(REPLICA)} - before)
        return max(100 * failed / len(outcome.statuses), 1e-3)  # a ratio to nothing at all can't be drawn

    return Case(LOST, "% of requests", (Contender(FAILED, killed, "value"),), better="lower", rounds=1, facts=facts)


STAGE = Stage(
    name="service",
    summary="HTTP on loopback: throughput, latency, overload, lost replicas",
    cases=_cases,
    comparisons=(
        Comparison(THROUGHPUT, OURS, OFFLINE, {"cpu": 0.85}),
        Comparison(THROUGHPUT, OURS, PLAIN, {"cpu": 5.0}),
        Comparison(THROUGHPUT, OURS, INFINITY, {"cpu": 1.0}),
        Comparison(LATENCY, BUSY, LIMIT, {"cpu": 1.0}),
        Comparison(LATENCY, RANDOM, LIMIT, label="latency, random arrivals"),
        Comparison(LONG_CASE, DELAY, OWN_BATCH),
        Comparison(OVERLOAD, ACCEPTED, BOUND, {"cpu": 1.0}),
        Comparison(LOST, FAILED, ALLOWED, {"cpu": 1.0}),
    ),
    packages=("transformers", "fastapi"),
    distributions=("ray", "fastapi", "uvicorn"),
)
