"""The files of docker/ are consistent with each other and with the code; neither Docker nor Kubernetes is started."""

import importlib
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from esmeray import __version__
from esmeray.common.command_line import run
from esmeray.service.http.metrics import Metrics
from esmeray.service.section import ServiceSettings
from esmeray.train_config.loading import load_settings
from tests.conftest import REPOSITORY

DOCKER = REPOSITORY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
PROGRAMS = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "min-worker", "max-worker")
COMPOSE = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DOCKER / "compose.yaml").read_text()))
OBJECTS = [part for path in sorted(DOCKER.glob("kuberay/*.yaml")) for part in yaml.safe_load_all(path.read_text())]
KINDS = {part["kind"]: part for part in OBJECTS}
CLUSTERS = [KINDS["RayCluster"]["spec"], KINDS["RayService"]["spec"]["rayClusterConfig"]]
IMAGE = f"esmeray:{__version__}"


def groups(cluster: dict) -> list[dict]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods() -> list[dict]:
    return [group["template"]["spec"] for cluster in CLUSTERS for group in groups(cluster)]


def commands() -> list[str]:
    started = " ".join(json.loads(DOCKERFILE.rpartition("\nCMD ")[2]))
    served = COMPOSE["services"]["serve"]["command"][0].partition("exec ")[2]
    return [started, served, *(part["spec"]["entrypoint"] for part in OBJECTS if part["kind"] == "RayJob")]


@pytest.mark.parametrize("command", commands())
def test_a_command_is_taken_by_the_program(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, *options = shlex.split(command.replace("/app/runs", str(tmp_path)).replace("/app/", ""))[1:]
    main = importlib.import_module(program.removesuffix(".py")).main
    assert run(main, [*options, "--dry_run"]) == 0, capsys.readouterr().err


def test_the_image_runs_as_a_user_and_holds_all_code():
    assert DOCKERFILE.rpartition("\nUSER ")[2].startswith("1000:1000\n") and "\nHEALTHCHECK " in DOCKERFILE
    allowed = set(re.findall(r"^!(.*)", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE))
    code = {"esmeray", *(path.name for path in REPOSITORY.glob("*.py"))}
    assert allowed == code | {"requirements/requirements.lock", "requirements.txt", "pyproject.toml", "LICENSE"}


def test_compose_publishes_on_this_machine_alone_and_confines_services():
    for name, service in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert int(service["user"].split(":")[0]) > 0 and service["cap_drop"] == ["ALL"] and service["read_only"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service["secrets"]) <= set(COMPOSE["secrets"]) and "healthcheck" in service, name
    for name in ("head", "worker", "serve"):
        service = COMPOSE["services"][name]
        assert service["image"] == IMAGE and service["environment"]["RAY_AUTH_MODE"] == "token"


def test_kubernetes_pods_are_confined_and_get_keys_from_secrets():
    for pod in pods():
        (container,) = pod["containers"]
        assert container["image"] == IMAGE and container["securityContext"] == CONFINED
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert all("value" not in variable for variable in container.get("env", []))


def test_kubernetes_clusters_need_a_token_and_admit_known_ports_alone():
    policies = [part["spec"] for part in OBJECTS if part["kind"] == "NetworkPolicy"]
    for cluster in CLUSTERS:
        assert cluster["authOptions"] == {"mode": "token"}
        (labels,) = {json.dumps(group["template"]["metadata"]["labels"]) for group in groups(cluster)}
        assert all({f"{name}-port" for name in PROGRAMS} <= {*group["rayStartParams"]} for group in groups(cluster))
        (policy,) = [spec for spec in policies if json.dumps(spec["podSelector"]["matchLabels"]) == labels]
        within, *others = policy["ingress"]
        assert within == {"from": [{"podSelector": {"matchLabels": json.loads(labels)}}]}
        assert {port["port"] for rule in others for port in rule["ports"]} <= {8000, 8080, 8265}
        assert [rule["ports"] for rule in others if "from" not in rule] in ([], [[{"port": 8000}]])


def test_the_rayservice_builds_with_keys(tmp_path):
    (application,) = yaml.safe_load(KINDS["RayService"]["spec"]["serveConfigV2"])["applications"]
    module, function = application["import_path"].split(":")
    assert f"\ndef {function}(" in Path(find_spec(module).origin).read_text()
    (tmp_path / "serve.yaml").write_text(KINDS["ConfigMap"]["data"]["serve.yaml"])
    settings = load_settings(ServiceSettings, tmp_path / "serve.yaml")
    files = application["args"]["config"], settings.serve.access.keys
    mounts = {mount["mountPath"] for mount in pods()[-1]["containers"][0]["volumeMounts"]}
    assert {str(Path(file).parent) for file in files} == mounts - {"/tmp", "/home/esmeray"}


def test_panels_read_metrics_of_the_service():
    metrics = Metrics()
    metrics.of_replica("model", {"replica": "0"})
    metrics.seconds.labels("embeddings")
    known = set(re.findall(r"\besmeray_\w+", metrics.page().decode()))
    panels = json.loads((DOCKER / "grafana" / "service.json").read_text())["panels"]
    named = set(
        re.findall(r"\besmeray_\w+", " ".join(target["expr"] for panel in panels for target in panel["targets"]))
    )
    assert len(named) >= 8 and named <= known, named - known
