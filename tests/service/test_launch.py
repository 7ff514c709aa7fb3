"""``serve_ray.py`` in a process of its own: HTTPS, keys, a start-up hook, two ingresses, new settings, SIGTERM."""

import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from esmeray.benchmarks.programs.servers import free_port
from esmeray.common.errors import ConfigError, EsmerayError
from esmeray.model.export.backbone import export
from esmeray.service import launch
from esmeray.service.http.access import new_key
from esmeray.service.replicas.computer import Computer
from esmeray.service.section import ServedModel, ServiceSettings
from tests.classifiers import export_tiny
from tests.conftest import REPOSITORY
from tests.service.serving import eventually
from tests.tasks.test_diffusion_model import trained

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
    """A certificate of 127.0.0.1 that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(private)
    return {"tls_certificate": str(folder / "certificate.pem"), "tls_key": str(folder / "key.pem")}


@pytest.mark.slow
def test_the_command_serves_text_over_https_takes_new_settings_and_ends_with_the_signal(
    tmp_path: Path, ray_address: str
):
    export_tiny(tmp_path / "text", source="qwen2")
    (tmp_path / "hook.py").write_text(HOOK)
    text, key = new_key("mine")
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump([key.model_dump()]))
    port = free_port()
    serve = {
        "models": [{"name": "text", "source": str(tmp_path / "text")}],
        "port": port,
        "ingress_replicas": 2,
        "startup_hook": "hook:mark",
        "access": {"keys": str(tmp_path / "keys.yaml"), **write_certificate(tmp_path)},
    }
    settings = {"serve": serve, "ray": {"address": ray_address}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    command = [sys.executable, str(REPOSITORY / "serve_ray.py"), "--config", str(file)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    output: Any = process.stdout
    try:
        ready = next(line for line in output if "waiting for it" not in line)  # a busy machine's proxy is slow
        assert f"ready: https://127.0.0.1:{port}/" in ready
        trusted = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60) as client:
            body = {"sequences": ["a cell divides", "Zürich 12.50 €"]}
            assert client.post("/v1/classify", json=body).status_code == 401
            client.headers["Authorization"] = f"Bearer {text}"
            answer = client.post("/v1/classify", json=body)
            assert answer.headers["x-marked"] == "yes" and len(answer.json()["data"]) == 2
            serve["limits"] = {"sequences": 1}
            file.write_text(yaml.safe_dump(settings))
            process.send_signal(signal.SIGHUP)
            assert any("updated" in line for line in output)
            eventually(lambda: client.post("/v1/classify", json=body).status_code == 413)
            # The end: what was asked before is answered, by either ingress, and never a 404 of the proxy.
            one = {"sequences": body["sequences"][:1]}
            with ThreadPoolExecutor() as pool:
                slow = pool.submit(client.post, "/v1/classify", json=one, headers={"x-folder": str(tmp_path)})
                eventually((tmp_path / "arrived").exists)
                process.send_signal(signal.SIGTERM)
                # Both ingresses know by then.
                eventually(lambda: all("is ending" in client.get("/ready").text for _ in range(10)))
                late = [client.post("/v1/classify", json=one) for _ in range(20)]
                assert {answer.status_code for answer in late} == {503} and not slow.done()
                assert all("retry-after" in answer.headers and "is ending" in answer.text for answer in late)
                assert client.get("/health").status_code == 200
                (tmp_path / "go").touch()
                assert slow.result().status_code == 200
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        output.close()


def test_sequence_diffusion_is_refused_by_name(tmp_path: Path):
    export(trained(), tmp_path / "run" / "export")
    served = ServedModel(name="designs", source=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=rf"sequence diffusion is not served.*design generate {served.source}'"):
        Computer(served, "cpu")


def test_a_taken_port_and_models_that_are_not_there_are_refused_before_ray_starts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("esmeray.cluster.connection.connected", lambda _: pytest.fail("Ray was started"))

    def refusal(model: str, port: int) -> str:
        serve = {"models": [model], "port": port}
        settings = ServiceSettings.model_validate({"serve": serve, "ray": {"address": "local"}})
        with pytest.raises(EsmerayError) as refused:
            launch.run(lambda: settings, print)
        return f"{refused.value.exit_code} {refused.value}"

    text = str(tmp_path / "text")
    assert f"2 models: there is no folder {text}" in refusal(text, free_port())
    assert "2 models: 'nosuch' is neither a folder nor" in refusal("nosuch", free_port())
    assert "2 models esm2_t6_8M: a size whose weights" in refusal("esm2_t6_8M", free_port())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = f"the service can't listen on 127.0.0.1:{port} (Address already in use)"
        assert refusal(text, port) == f"4 serve.port: {where}; choose another"


def test_a_proxy_that_is_slow_to_come_up_is_waited_for_with_a_line(monkeypatch, capsys):
    def start(**_: object) -> None:
        raise TimeoutError("HTTP proxies not available after 60s.")

    states = [{"a": "STARTING"}, {"a": "HEALTHY", "b": "STARTING"}, {"a": "HEALTHY", "b": "HEALTHY"}]
    serve = SimpleNamespace(start=start, status=lambda: SimpleNamespace(proxies=states.pop(0)))
    monkeypatch.setattr(launch.time, "sleep", lambda _: None)
    launch._start_proxies(serve, {}, print)
    assert capsys.readouterr().out.count("\n") == 1 and not states
