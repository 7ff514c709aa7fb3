"""``serve_ray.py`` in a process of its own: HTTPS, keys, a start-up hook, two ingresses, new settings, SIGTERM."""

import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from common.errors import ConfigError
from model.export.backbone import export
from service.http.access import new_key
from service.replicas.computer import Computer
from tests.classifiers import export_tiny
from tests.conftest import REPOSITORY
from tests.model.tasks.test_diffusion import trained
from train_config.service_schema import ServedModel

HOOK = """
def mark(app):
    @app.middleware("http")
    async def marked(request, call_next):
        answer = await call_next(request)
        answer.headers["x-marked"] = "yes"
        return answer
"""


def write_certificate(folder: Path) -> dict[str, str]:
    """A certificate of 127.0.0.1 that vouches for itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    certificate = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    assert process.stdout is not None
    try:
        assert f"ready: https://127.0.0.1:{port}/" in process.stdout.readline()
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
            until_s = time.monotonic() + 60
            while client.post("/v1/classify", json=body).status_code != 413:
                assert time.monotonic() < until_s
                time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert "updated" in process.stdout.read()
    finally:
        process.kill()
        process.stdout.close()


def test_sequence_diffusion_is_refused_by_name(tmp_path: Path):
    export(trained(), tmp_path / "run" / "export")
    served = ServedModel(name="designs", source=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=rf"sequence diffusion is not served.*design generate {served.source}'"):
        Computer(served, "cpu")
