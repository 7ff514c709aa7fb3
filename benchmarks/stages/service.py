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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.models import our_embedder, random_network, save_weights
from benchmarks.harness.proteins import read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Reference, Setting, Stage, WrongWorkError
from benchmarks.programs.http_load import Load, Outcome, begin_load, end_load, run_load
from benchmarks.programs.servers import free_port, replicas, server, service, service_bytes, write_settings
from dataset.tokens.base import EsmSequenceTokenizer
from inference.client import Client

PROTEINS, LONGEST, TOGETHER, CONNECTIONS = 960, 1022, 8, 16
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
    sequences = [text[:LONGEST] for text in spread_by_length(proteins.sequences, 48 if setting.quick else PROTEINS)]
    random.Random(0).shuffle(sequences)
    folder = save_weights(random_network("esm2_t6_8M"), setting.folder / "esm2_t6_8M")
    EsmSequenceTokenizer().save(folder)
    groups = [sequences[start : start + TOGETHER] for start in range(0, len(sequences), TOGETHER)]
    bodies = [json.dumps({"sequences": group}) for group in groups]
    singles = [json.dumps({"sequences": [text]}) for text in sequences]
    facts: Facts = {**proteins.facts, "sequences": len(sequences), "residues": sum(map(len, sequences))}
    model = {"name": "esm2", "source": str(folder), "precision": "bf16", "cache_mb": 0, "max_wait_ms": MAX_WAIT_MS}
    model["queue_tokens"] = 60_000

    def load(address: str, bodies: Sequence[str], path: str = "/v1/encode", **how: Any) -> Outcome:
        outcome = run_load(Load(address + path, bodies, "application/x-npy" if path == "/v1/encode" else "*/*", **how))
        if how.get("rate") is None and set(outcome.counts) != {200}:
            raise WrongWorkError(f"{address}: answers {dict(outcome.counts)}")
        return outcome

    def saturated(address: str, bodies: Sequence[str], path: str = "/v1/encode") -> float:
        return TOGETHER * len(load(address, bodies, path, connections=CONNECTIONS, requests=len(bodies)).statuses)

    with ExitStack() as servers:
        address = servers.enter_context(service(setting.folder, model))
        contenders = [
            Contender(OURS, partial(saturated, address, bodies), short=partial(saturated, address, bodies[:8])),
            Contender(OFFLINE, _offline(folder, sequences)),
        ]
        for label, peer, path, peer_bodies in _peers(folder, groups, servers):
            measure = partial(saturated, peer, peer_bodies, path)
            contenders.append(Contender(label, measure, short=measure))
        same = partial(_same, address, folder)
        yield Case(THROUGHPUT, "sequences/s", tuple(contenders), rounds=3, check=same, facts=facts)
    with service(setting.folder, model) as address:
        saturating = (
            len(bodies) * TOGETHER / load(address, bodies, connections=CONNECTIONS, requests=len(bodies)).seconds
        )
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
        yield _overload_case(setting, address, load, singles, saturating, facts)
    yield _lost_case(setting, model, bodies, facts)


def _peers(
    folder: Path, groups: Sequence[Sequence[str]], servers: ExitStack
) -> Iterator[tuple[str, str, str, list[str]]]:
    """Name, address, path and bodies of the other servers, started one after the other."""
    port = free_port()
    servers.enter_context(
        server([sys.executable, "-m", "benchmarks.peers.fastapi_server", str(folder), str(port)], port)
    )
    yield PLAIN, f"http://127.0.0.1:{port}", "/embed", [json.dumps({"sequences": group}) for group in groups[:12]]
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


def _offline(folder: Path, sequences: Sequence[str]) -> Callable[[], float]:
    """The forward pass of all sequences on one core, in a process of its own."""
    code = (
        "import sys, json, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from benchmarks.harness.models import our_embedder\n"
        "embed = our_embedder(Path(sys.argv[1]), 'cpu', torch.bfloat16); texts = json.loads(sys.stdin.readline())\n"
        "embed(texts[:16]); print('ready', flush=True)\n"
        "for line in sys.stdin: embed(texts); print('done', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    print(json.dumps(list(sequences)), file=stdin, flush=True)
    stdout.readline()

    def embed() -> float:
        print("again", file=stdin, flush=True)
        stdout.readline()
        return len(sequences)

    return embed


def _same(address: str, folder: Path) -> Facts:
    """Hold answers to those of the offline forward pass."""
    texts = ["MKTAYIAKQR", "MSILVTRPSPAGEEL" * 20, "MQIFVKTLTGKTITLEVEPS"]
    with Client(address) as client:
        ours = np.asarray(client.embed(texts))
    difference = float(np.abs(ours - our_embedder(folder, "cpu", torch.bfloat16)(texts).numpy()).max())
    if not difference <= 0.05:
        raise WrongWorkError(f"answers differ from the offline embeddings by {difference}")
    return {"largest difference to the offline embeddings, bf16": round(difference, 5)}


def _long_case(setting: Setting, address: str, load: Any, singles: Sequence[str], facts: Facts) -> Case:
    """Short requests while one of 35,000 residues is computed."""
    length = 500 if setting.quick else LONG
    text = json.dumps({"sequences": ["".join(random.Random(1).choices("ACDEFGHIKLMNPQRSTVWY", k=length))]})

    def alone() -> float:
        return load(address, [text], connections=1, requests=1).percentile_ms(100)

    def delayed() -> float:
        process = begin_load(Load(f"{address}/v1/encode", singles, connections=2, seconds=30, requests=500))
        time.sleep(3)
        load(address, [text], connections=1, requests=1)
        return end_load(process).percentile_ms(100)

    contenders = Contender(DELAY, delayed, "value"), Contender(OWN_BATCH, alone, "value")
    return Case(LONG_CASE, "ms", contenders, better="lower", rounds=1, facts=facts)


def _overload_case(
    setting: Setting, address: str, load: Any, singles: Sequence[str], saturating: float, facts: Facts
) -> Case:
    """Ten minutes of twice what can be answered."""
    facts = dict(facts)
    seconds = 6.0 if setting.quick else SOAK_S

    def soak() -> float:
        process = begin_load(
            Load(f"{address}/v1/encode", singles, "application/x-npy", rate=2 * saturating, seconds=seconds)
        )
        time.sleep(seconds / 10)
        after_a_minute = service_bytes()
        time.sleep(0.85 * seconds)
        facts["memory after a minute, MB"] = round(after_a_minute / 1e6)
        facts["memory at the end, relative"] = round(service_bytes() / after_a_minute, 3)
        outcome = end_load(process)
        facts["seconds"] = round(outcome.seconds)
        facts["requests"] = len(outcome.statuses)
        facts["answers by status"] = str(dict(sorted(outcome.counts.items())))
        return outcome.percentile_ms(99)

    return Case(OVERLOAD, "ms", (Contender(ACCEPTED, soak, "value"),), better="lower", rounds=1, facts=facts)


def _lost_case(setting: Setting, model: dict[str, Any], bodies: Sequence[str], facts: Facts) -> Case:
    """Requests while the model's replica is killed, and while its weights are changed."""
    facts = dict(facts)
    kills = 1 if setting.quick else KILLS
    port, path = free_port(), setting.folder / "lost.yaml"

    def killed() -> float:
        write_settings(path, port, {**model, "replicas": 2})
        url = f"http://127.0.0.1:{port}/v1/encode"
        with server([sys.executable, "serve_ray.py", "--config", str(path)], port) as serving:
            process = begin_load(Load(url, bodies, "application/x-npy", connections=4, seconds=20.0 * kills + 10))
            for _ in range(kills):
                time.sleep(20)
                replicas()[0].send_signal(signal.SIGKILL)
            outcome = end_load(process)
            failed = sum(count for status, count in outcome.counts.items() if status != 200)
            facts["requests, kills"] = len(outcome.statuses)
            facts["answers by status, kills"] = str(dict(sorted(outcome.counts.items())))
            facts["503 without Retry-After"] = outcome.unexplained
            before = {replica.pid for replica in replicas()}
            process = begin_load(Load(url, bodies, "application/x-npy", connections=4, seconds=60.0))
            time.sleep(3)
            Path(str(model["source"]), "changed").write_text("a file more is another version of the weights")
            serving.send_signal(signal.SIGHUP)
            updated = end_load(process)
            facts["answers by status, rolling update"] = str(dict(sorted(updated.counts.items())))
            facts["replicas replaced by the update"] = len({replica.pid for replica in replicas()} - before)
        return max(100 * failed / len(outcome.statuses), 1e-3)

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
