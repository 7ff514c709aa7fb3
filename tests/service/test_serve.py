"""On Ray Serve: answers over HTTP, while a replica is killed and while the model is replaced."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from esmeray.benchmarks.programs.servers import free_port
from esmeray.common.errors import ResourceError
from esmeray.service.section import ServedModel, ServeSection
from tests.dataset.tokenizer_folders import esm
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences
from tests.service.serving import PRECISION, eventually

pytestmark = pytest.mark.slow
SEQUENCES = random_sequences([20, 40, 9])
ASK = httpx.Client(timeout=60)  # the machine may be busy


@pytest.fixture(scope="module")
def served(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServeSection]]:
    from ray import serve

    folder = esm(tmp_path_factory.mktemp("served") / "esm")
    save_masked_lm(folder, "esm", vocab_size=33)
    port = free_port()
    models = [ServedModel(name="esm", source=str(folder), **PRECISION)]
    config = ServeSection(models=models, port=port)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy(config)
    yield f"http://127.0.0.1:{port}", config
    serve.shutdown()


def deploy(config: ServeSection) -> None:
    from ray import serve

    from esmeray.service.deployments import APPLICATION, application

    serve.run(application(config, "cpu"), name=APPLICATION, route_prefix="/")


def asked_while(address: str, change: Callable[[], Awaitable[None]]) -> list[httpx.Response]:
    """Answers to distinct sequences of six callers until the change is made, and to twenty more of each."""

    async def ask(client: httpx.AsyncClient, caller: int, changing: asyncio.Task[None]) -> list[httpx.Response]:
        answers, left = [], 20
        while left:
            left -= changing.done()
            text = random_sequences([30], seed=10_000 * caller + len(answers))
            answers.append(await client.post("/v1/encode", json={"sequences": text}))
        return answers

    async def ask_all() -> list[httpx.Response]:
        changing: asyncio.Task[None] = asyncio.create_task(change())  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            answers = await asyncio.gather(*(ask(client, caller, changing) for caller in range(6)))
        await changing
        return [answer for of_one in answers for answer in of_one]

    return asyncio.run(ask_all())


def encoded(address: str, sequences: list[str]) -> httpx.Response:
    return ASK.post(f"{address}/v1/encode", json={"sequences": sequences})


def replica_metric(address: str, name: str) -> tuple[int, float]:
    """Process of the replica that answered last, and its value of a metric."""
    encoded(address, ["MKT"])
    lines = [line for line in ASK.get(f"{address}/metrics").text.splitlines() if f"esmeray_replica_{name}{{" in line]
    return int(lines[-1].split('replica="')[1].split('"')[0]), float(lines[-1].split()[-1])


def test_requests_are_answered_as_by_the_model_itself(served: tuple[str, ServeSection]):
    from tests.inference.models.opened import opened, rows_of

    address, config = served
    assert ASK.get(f"{address}/ready").status_code in (200, 503) and ASK.get(f"{address}/").status_code == 200
    answer = ASK.post(f"{address}/v1/embeddings", json={"input": SEQUENCES}, headers={"X-Request-ID": "mine"})
    wanted = rows_of(opened(config.models[0].source), SEQUENCES)["mean"].numpy()
    vectors = [item["embedding"] for item in answer.json()["data"]]
    np.testing.assert_allclose(vectors, wanted, rtol=1e-5, atol=1e-5)
    assert answer.headers["x-request-id"] == "mine"
    assert encoded(address, ["M1"]).json()["record"] == "0"
    assert ASK.post(f"{address}/v1/encode", content=b" " * 16_000_001).status_code == 413


def test_a_large_request_delays_no_small_one_and_ends_when_its_client_leaves(served: tuple[str, ServeSection]):
    address, _ = served
    large = {"sequences": random_sequences([1400]), "method": "masked"}  # 2 million tokens: minutes of batches

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=3) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/masked", json=large)

    answers = asked_while(address, leave)
    assert {answer.status_code for answer in answers} == {200} and len(answers) > 120
    eventually(lambda: replica_metric(address, "queued_tokens")[1] == 0)


def test_a_killed_replica_costs_a_retry_at_most_and_is_replaced(served: tuple[str, ServeSection]):
    address, _ = served
    before, _ = replica_metric(address, "tokens")

    async def kill() -> None:
        await asyncio.sleep(0.2)
        os.kill(before, signal.SIGKILL)

    answers = asked_while(address, kill)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    eventually(lambda: encoded(address, ["MKT"]).status_code == 200)
    assert replica_metric(address, "tokens")[0] != before and not psutil.pid_exists(before)


def test_a_changed_model_replaces_the_replica_and_no_request_fails(served: tuple[str, ServeSection]):
    address, config = served
    before, _ = replica_metric(address, "tokens")
    first = encoded(address, SEQUENCES).json()

    async def change() -> None:
        save_masked_lm(Path(config.models[0].source), "esm", vocab_size=33, seed=5)
        await asyncio.to_thread(deploy, config)

    answers = asked_while(address, change)
    assert {answer.status_code for answer in answers} == {200}
    assert replica_metric(address, "tokens")[0] != before
    assert encoded(address, SEQUENCES).json()["data"] != first["data"]


def test_the_log_follows_no_link_and_is_in_no_folder_of_another_user(
    served: tuple[str, ServeSection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray
    from ray._private import worker

    from esmeray.service.replicas import replica as module

    assert ray.is_initialized() and worker.global_worker.node is not None
    folder = Path(worker.global_worker.node.get_logs_dir_path(), "serve")
    monkeypatch.setattr(module.log, "handlers", [])
    monkeypatch.setattr(module.os, "getpid", lambda: 2**31)
    link = folder / f"esmeray-{2**31}.log"
    link.symlink_to(tmp_path / "file-of-root")
    with pytest.raises(FileExistsError):
        module._log_to_file()
    link.unlink()
    monkeypatch.setattr(module.os, "geteuid", lambda: 65534)
    with pytest.raises(ResourceError, match="serve: is another user's"):
        module._log_to_file()
    assert not [*tmp_path.iterdir()]
