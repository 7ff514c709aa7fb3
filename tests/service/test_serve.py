"""On Ray Serve: answers over HTTP, while a replica is killed and while the model is replaced."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from esmeray.common.errors import ResourceError
from esmeray.service.section import ServeSection
from tests.dataset.tokenizer_folders import esm
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences
from tests.service.serving import PRECISION

pytestmark = pytest.mark.slow
SEQUENCES = random_sequences([20, 40, 9])
ASK = httpx.Client(timeout=60)  # the machine may be busy


@pytest.fixture(scope="module")
def served(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServeSection]]:
    from ray import serve

    from esmeray.service.deployments import APPLICATION, application

    folder = esm(tmp_path_factory.mktemp("served") / "esm")
    save_masked_lm(folder, "esm", vocab_size=33)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ServeSection.model_validate(
        {"models": [{"name": "esm", "source": str(folder), **PRECISION}], "port": port}
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(config, "cpu"), name=APPLICATION, route_prefix="/")
    yield f"http://127.0.0.1:{port}", config
    serve.shutdown()


async def asked_until(address: str, done: Callable[[], bool]) -> list[httpx.Response]:
    """Answers to distinct sequences of six callers until ``done``, and twenty more."""
    answers: list[httpx.Response] = []

    async def ask(client: httpx.AsyncClient, caller: int) -> None:
        left, number = 20, 0
        while left:
            left, number = left - done(), number + 1
            text = random_sequences([30], seed=1000 * caller + number)
            answers.append(await client.post("/v1/encode", json={"sequences": text}))

    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        await asyncio.gather(*(ask(client, caller) for caller in range(6)))
    return answers


def asked_while(address: str, change: Callable[[], Awaitable[None]]) -> list[httpx.Response]:
    async def both() -> list[httpx.Response]:
        changing = asyncio.create_task(change())
        answers = await asked_until(address, changing.done)
        await changing
        return answers

    return asyncio.run(both())


def replica_pid(address: str) -> int:
    """Process of the replica, as the metrics name it."""
    ASK.post(f"{address}/v1/encode", json={"sequences": ["MKT"]})
    lines = [line for line in ASK.get(f"{address}/metrics").text.splitlines() if "esmeray_replica_tokens{" in line]
    return int(lines[-1].split('replica="')[1].split('"')[0])


def test_requests_are_answered_as_by_the_model_itself(served: tuple[str, ServeSection]):
    from tests.inference.models.opened import opened, rows_of

    address, config = served
    assert ASK.get(f"{address}/ready").status_code in (200, 503) and ASK.get(f"{address}/").status_code == 200
    answer = ASK.post(f"{address}/v1/embeddings", json={"input": SEQUENCES}, headers={"X-Request-ID": "mine"})
    wanted = rows_of(opened(config.models[0].source), SEQUENCES)["mean"].numpy()
    np.testing.assert_allclose([each["embedding"] for each in answer.json()["data"]], wanted, rtol=1e-5, atol=1e-5)
    assert answer.headers["x-request-id"] == "mine"
    assert ASK.post(f"{address}/v1/encode", json={"sequences": ["M1"]}).json()["record"] == "0"
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
    until_s = time.monotonic() + 60
    while queued_tokens(address):
        assert time.monotonic() < until_s


def queued_tokens(address: str) -> float:
    """As the replica says with each answer."""
    ASK.post(f"{address}/v1/encode", json={"sequences": ["MKT"]})
    lines = [line for line in ASK.get(f"{address}/metrics").text.splitlines() if "replica_queued_tokens{" in line]
    return max(float(line.split()[-1]) for line in lines)


def test_a_killed_replica_costs_a_retry_at_most_and_is_replaced(served: tuple[str, ServeSection]):
    address, _ = served
    before = replica_pid(address)

    async def kill() -> None:
        await asyncio.sleep(0.2)
        os.kill(before, signal.SIGKILL)

    answers = asked_while(address, kill)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    until_s = time.monotonic() + 60
    while ASK.post(f"{address}/v1/encode", json={"sequences": ["MKT"]}).status_code != 200:
        assert time.monotonic() < until_s
    assert replica_pid(address) != before and not psutil.pid_exists(before)


def test_a_changed_model_replaces_the_replica_and_no_request_fails(served: tuple[str, ServeSection]):
    from ray import serve

    from esmeray.service.deployments import APPLICATION, application

    address, config = served
    before, folder = replica_pid(address), Path(config.models[0].source)
    first = ASK.post(f"{address}/v1/encode", json={"sequences": SEQUENCES}).json()

    async def deploy() -> None:
        save_masked_lm(folder, "esm", vocab_size=33, seed=5)
        run = {"name": APPLICATION, "route_prefix": "/"}
        await asyncio.to_thread(serve.run, application(config, "cpu"), **run)

    answers = asked_while(address, deploy)
    assert {answer.status_code for answer in answers} == {200}
    second = ASK.post(f"{address}/v1/encode", json={"sequences": SEQUENCES}).json()
    assert replica_pid(address) != before and second["data"] != first["data"]


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
