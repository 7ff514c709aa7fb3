"""``serve_ray.py`` in a child process answers over HTTPS without losing requests.

Also while a replica is killed, while model and settings are replaced, and for requests before the signal to stop.
"""

import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from ray._private import worker

from benchmarks.programs.service import free_port
from esmeray.common.errors import ResourceError
from esmeray.inference.index.search import open_index
from esmeray.service.http.access import new_key
from tests.conftest import REPOSITORY
from tests.dataset.tokenizer_folders import esm
from tests.inference.models.opened import opened, rows_of
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences
from tests.service.serving import PRECISION, eventually, save_index

pytestmark = pytest.mark.slow
SEQUENCES = random_sequences([20, 40, 9])
ASKED = {"sequences": SEQUENCES}
HOOK = """
import asyncio
from pathlib import Path

def mark(app):
    @app.middleware("http")
    async def marked(request, call_next):
        if "x-folder" in request.headers:
            folder = Path(request.headers["x-folder"])
            (folder / "arrived").touch()
            while not (folder / "go").exists():
                await asyncio.sleep(0.05)
        answer = await call_next(request)
        answer.headers["x-marked"] = "yes"
        return answer
"""


def write_certificate(folder: Path) -> dict[str, str]:
    """Write a self-signed certificate for 127.0.0.1."""
    files = {"tls_certificate": str(folder / "certificate.pem"), "tls_key": str(folder / "key.pem")}
    new_key = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "1"]
    here = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    written = ["-out", files["tls_certificate"], "-keyout", files["tls_key"]]
    subprocess.run(["openssl", *new_key, *here, *written], check=True, capture_output=True)
    return files


@dataclass
class Served:
    """The process, its folder with the settings ``serve.yaml``, and the keys of two callers."""

    folder: Path
    process: subprocess.Popen[str]
    serve: dict[str, Any]
    keys: dict[str, str]

    def of_client(self, caller: str = "mine") -> dict[str, Any]:
        """Settings of a client with a long timeout, as the machine may be busy."""
        trusted = ssl.create_default_context(cafile=self.folder / "certificate.pem")
        address = f"https://127.0.0.1:{self.serve['port']}"
        headers = {"Authorization": f"Bearer {self.keys[caller]}"}
        return {"base_url": address, "verify": trusted, "headers": headers, "timeout": 60}

    def end(self, client: httpx.Client) -> None:
        """Stop the service; check that both ingresses answer earlier requests and the proxy never answers 404."""
        with ThreadPoolExecutor() as pool:
            slow = pool.submit(client.post, "/v1/encode", json=ASKED, headers={"x-folder": str(self.folder)})
            eventually((self.folder / "arrived").exists)
            self.process.send_signal(signal.SIGTERM)
            # Both ingresses have been notified by then.
            eventually(lambda: all("is ending" in client.get("/ready").text for _ in range(10)))
            late = [client.post("/v1/encode", json=ASKED) for _ in range(20)]
            assert {answer.status_code for answer in late} == {503} and not slow.done()
            assert all("retry-after" in answer.headers and "is ending" in answer.text for answer in late)
            assert {answer.headers["connection"] for answer in late} == {"close"}
            assert client.get("/health").status_code == 200
            (self.folder / "go").touch()
            assert slow.result().status_code == 200
        assert self.process.wait(60) == 128 + signal.SIGTERM
        errors = (self.folder / "stderr").read_text()
        assert "Traceback" not in errors and "LongPollClient" not in errors, errors


@pytest.fixture(scope="module")
def served(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    save_masked_lm(esm(folder / "esm"), "esm", vocab_size=33)
    (folder / "hook.py").write_text(HOOK)
    made = {name: new_key(name) for name in ("mine", "large")}
    (folder / "keys.yaml").write_text(yaml.safe_dump([key.model_dump() for _, key in made.values()]))
    serve = {
        "models": [{"name": "esm", "source": str(folder / "esm"), "cpus": 0.5, **PRECISION}],
        "indexes": [{"name": "proteins", "source": str(save_index(folder / "proteins", folder / "esm"))}],
        "port": free_port(),
        "ingress_replicas": 2,
        "startup_hook": "hook:mark",
        "access": {"keys": str(folder / "keys.yaml"), **write_certificate(folder)},
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"serve": serve, "ray": {"address": ray_address}}))
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{folder}"}
    command = [sys.executable, str(REPOSITORY / "serve_ray.py"), "--config", str(file)]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder
        )
    served = Served(folder, process, serve, {name: text for name, (text, _) in made.items()})
    output: Any = process.stdout
    try:
        ready = next(line for line in output if "waiting for it" not in line)  # a busy machine's proxy is slow
        assert f"ready: https://127.0.0.1:{serve['port']}/" in ready
        yield served
        with httpx.Client(**served.of_client()) as client:
            served.end(client)
    finally:
        process.kill()
        output.close()


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(**served.of_client()) as client:
        yield client


def asked_while(served: Served, change: Callable[[], Awaitable[None]]) -> list[httpx.Response]:
    """Answers to two clients that send distinct sequences until the change is done, and twenty more each."""

    async def ask(client: httpx.AsyncClient, caller: int, changing: asyncio.Task[None]) -> list[httpx.Response]:
        answers, left = [], 20
        while left:
            left -= changing.done()
            text = random_sequences([30], seed=10_000 * caller + len(answers))
            answers.append(await client.post("/v1/encode", json={"sequences": text}))
            await asyncio.sleep(0.1)  # otherwise the starting processes would get no CPU time
        return answers

    async def ask_all() -> list[httpx.Response]:
        changing: asyncio.Task[None] = asyncio.create_task(change())  # type: ignore[arg-type]
        async with httpx.AsyncClient(**served.of_client()) as client:
            answers = await asyncio.gather(*(ask(client, caller, changing) for caller in range(2)))
        await changing
        return [answer for of_one in answers for answer in of_one]

    return asyncio.run(ask_all())


def encoded(client: httpx.Client, sequences: list[str]) -> httpx.Response:
    return client.post("/v1/encode", json={"sequences": sequences})


def replica_pid(client: httpx.Client) -> int:
    """Pid of the replica that answered last, as reported by one of the ingresses."""
    found: list[str] = []
    while not found:
        encoded(client, ["MKT"])
        found = re.findall(r'esmeray_replica_tokens{model="esm",replica="(\d+)"}', client.get("/metrics").text)
    return int(found[-1])


def test_requests_are_answered_as_by_the_model_itself_to_who_has_a_key(served: Served, client: httpx.Client):
    assert client.get("/ready").status_code in (200, 503) and client.get("/").status_code == 200
    assert client.post("/v1/encode", json=ASKED, headers={"Authorization": ""}).status_code == 401
    answer = client.post("/v1/embeddings", json={"input": SEQUENCES}, headers={"X-Request-ID": "mine"})
    wanted = rows_of(opened(served.folder / "esm"), SEQUENCES)["mean"].numpy()
    vectors = [item["embedding"] for item in answer.json()["data"]]
    np.testing.assert_allclose(vectors, wanted, rtol=1e-5, atol=1e-5)
    assert (answer.headers["x-request-id"], answer.headers["x-marked"]) == ("mine", "yes")
    root = client.post("/", json={"inputs": SEQUENCES, "normalize": False})
    np.testing.assert_allclose(root.json(), wanted, rtol=1e-5, atol=1e-5)
    index = open_index(served.folder / "proteins" / "index")
    hits = client.post("/v1/search", json={"sequences": SEQUENCES, "top_k": 3}).json()["data"]
    nearest, _ = index.search(np.array(vectors, np.float32), 3)
    assert [[hit["id"] for hit in item["neighbours"]] for item in hits] == [index.ids(rows) for rows in nearest]
    assert client.post("/v1/encode", content=b" " * 16_000_001).status_code == 413


@pytest.mark.nightly
def test_a_killed_replica_costs_a_retry_at_most_and_is_replaced_by_one_with_the_same_weights(
    served: Served, client: httpx.Client
):
    lost = replaced = replica_pid(client)

    async def kill() -> None:
        await asyncio.sleep(0.2)
        os.kill(lost, signal.SIGKILL)

    for refused in [answer for answer in asked_while(served, kill) if answer.status_code != 200]:
        assert refused.status_code == 503 and "retry-after" in refused.headers
    while replaced == lost:
        replaced = replica_pid(client)
    weights = served.folder / "esm" / "model.safetensors"
    served_weights = weights.read_bytes()
    answer = encoded(client, SEQUENCES).json()["data"]
    # A new replica is refused as long as the files differ from the first replica's.
    save_masked_lm(served.folder / "esm", "esm", vocab_size=33, seed=9)
    os.kill(replaced, signal.SIGKILL)
    node = worker.global_worker.node
    assert node is not None
    logs = Path(node.get_logs_dir_path(), "serve")
    refusal = "models: esm: its files changed since the service was started"
    eventually(lambda: any(refusal in log.read_text() for log in logs.glob("esmeray-*.log")))
    weights.write_bytes(served_weights)
    eventually(lambda: encoded(client, SEQUENCES).json().get("data") == answer)


def test_changed_settings_and_models_are_reloaded_without_a_failed_request(served: Served, client: httpx.Client):
    first = encoded(client, SEQUENCES).json()
    output: Any = served.process.stdout
    file = served.folder / "serve.yaml"

    async def change() -> None:
        save_masked_lm(served.folder / "esm", "esm", vocab_size=33, seed=5)
        settings = yaml.safe_load(file.read_text())
        settings["serve"]["limits"] = {"sequences": 3}
        file.write_text(yaml.safe_dump(settings))
        served.process.send_signal(signal.SIGHUP)
        # Ray logs its own lines about the replica that was killed above.
        said = await asyncio.to_thread(lambda: next((line for line in output if "reloading" in line), ""))
        assert said == "reloading: all replicas are replaced\n"
        updated = await asyncio.to_thread(lambda: next((line for line in output if "updated" in line), ""))
        assert "updated, but indexes: proteins: its vectors are of" in updated

    answers = asked_while(served, change)
    assert {answer.status_code for answer in answers} == {200}
    eventually(lambda: encoded(client, ["MKT"] * 4).status_code == 413)
    assert encoded(client, SEQUENCES).json()["data"] != first["data"]
    late = client.post("/v1/search", json={"sequences": SEQUENCES})
    assert late.status_code == 500 and "are of another model than the served one" in late.text


def test_the_log_follows_no_link_and_is_in_no_folder_of_another_user(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray

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
    with pytest.raises(ResourceError, match="serve: belongs to another user"):
        module._log_to_file()
    assert not [*tmp_path.iterdir()]
