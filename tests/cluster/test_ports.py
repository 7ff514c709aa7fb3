"""A head node with the ports of the Kubernetes manifests, in its own network namespace."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
import yaml

from tests.clusters import RAY, REPOSITORY, TOKEN

ALONE = ["unshare", "--net", *([] if os.getuid() == 0 else ["--map-root-user"])]
NODE = "10.9.8.7"
FIXED = {6379, 6380, 6381, 6382, 6383, 8265, 10001, 52365}
METRICS = {8080, 44217, 44227}
SCAN = """
import json, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
import psutil
from tests.ports import listening, reply

with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True) as head:
    for line in head.stdout:
        if "Ray runtime started" in line:
            break
    root = psutil.Process(head.pid)
    deadline = time.monotonic() + 60
    while not {port for _, port in listening(root)} >= {8080, 44217, 52365, 10001} and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(2)
    sockets = listening(root)
    with ThreadPoolExecutor(len(sockets)) as pool:
        print(json.dumps([*zip(sockets, pool.map(reply, *zip(*sockets)))]))
    for process in root.children(recursive=True):
        process.kill()
    head.kill()
"""


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run([*ALONE, "ip", "a"], check=False).returncode != 0, reason="needs own networks")
def test_a_head_opens_the_ports_of_the_manifests_alone():
    documents = yaml.safe_load_all((REPOSITORY / "docker" / "kuberay" / "raycluster.yaml").read_text())
    (cluster,) = [part["spec"] for part in documents if part["kind"] == "RayCluster"]
    options = cluster["headGroupSpec"]["rayStartParams"] | {
        "node-ip-address": NODE,
        "dashboard-host": NODE,  # KubeRay's defaults are all addresses and this metrics port
        "metrics-export-port": "8080",
        "object-store-memory": str(100 * 1024 * 1024),
    }
    network = f'ip link set lo up && ip address add {NODE}/32 dev lo && exec "$@"'
    head = [RAY, "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())]
    command = [*ALONE, "sh", "-c", network, "sh", sys.executable, "-c", SCAN, *head]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sockets:  # paths of sockets must be short
        environment = os.environ | {"RAY_TMPDIR": sockets, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        output = subprocess.check_output(command, cwd=REPOSITORY, env=environment, text=True)
    rows = json.loads(output.splitlines()[-1])
    workers = range(10002, 11000)
    assert {port for (_, port), _ in rows if port not in workers} == FIXED | METRICS
    for (address, port), replied in rows:
        if port not in METRICS:
            assert replied.startswith(("401", "UNAUTHENTICATED", "200 /, 401")), (address, port, replied)
