"""Commands on clusters of ``ray start``: with a token, without one, and with an unusable one."""

import json
import os
from pathlib import Path

import pytest

from esmeray.train_config.loading import dump_config
from tests.clusters import TOKEN, StartedCluster, python
from tests.runs import tiny_config

pytestmark = pytest.mark.slow

OTHER = "0" * 64
PROGRAM = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
import ray
from esmeray.cluster.connection import capacity, connected, hardware
from esmeray.cluster.placement import Workers
from esmeray.cluster.section import RaySection
from esmeray.common.command_line import run
from esmeray.tools.__main__ import main

def connect(words):
    with connected(RaySection()):
        print(hardware(), capacity(Workers(1, 1, use_gpu=False)).whole, sep="; ")
    return 0

replies = []
own = ray.__version__
for words, variables in json.loads(sys.argv[1]):
    ray.__version__ = variables.pop("version", own)
    os.environ.update(variables)
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as refused:
        code = run(main if words else connect, words)
    replies.append([code, said.getvalue(), refused.getvalue()])
    for name in variables:
        del os.environ[name]
print(json.dumps(replies))
"""


def with_token(home: Path, mode: int) -> dict[str, str]:
    """Write the token to a home folder, in a file with this mode; return the variable HOME."""
    file = home / ".ray" / "auth_token"
    file.parent.mkdir(parents=True)
    file.write_text(TOKEN)
    file.chmod(mode)
    return {"HOME": str(home)}


@pytest.fixture(scope="module")
def replies(
    ray_cluster: StartedCluster, open_cluster: StartedCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, str, str]]]:
    """Exit codes, outputs and refusals of ``train`` and of connecting without a token, by name of the environment.

    All commands connect to a cluster in the same way; ``train`` and ``tune`` also look for a running one first.
    """
    folder = tmp_path_factory.mktemp("access")
    own, others = with_token(folder / "own", 0o600), with_token(folder / "others", 0o644)
    file = folder / "config.yaml"
    file.write_text(dump_config(tiny_config(folder, ray={"num_workers": 1})))
    train, connect = ["train", "--config", str(file)], []
    of_open_cluster = {"RAY_ADDRESS": open_cluster.address}
    calls = {
        "wrong token": [(words, {"RAY_AUTH_TOKEN": OTHER}) for words in (train, connect)],
        "no token": [(train, {"RAY_AUTH_MODE": "token"})],
        "own token": [(connect, own | {"RAY_AUTH_MODE": "disabled"})],
        # From outside of the cluster, then with another version of Ray, then with the same version again.
        "outside": [(connect, own | {"RAY_ADDRESS": ray_cluster.client})],
        "other version": [(connect, own | {"version": "1.2.3"})],
        "others' token": [(train, others)],
        "open cluster": [
            (connect, of_open_cluster | shell) for shell in ({"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "token"}, {})
        ],
    }
    default = {"RAY_ADDRESS": ray_cluster.address, "HOME": str(folder)}
    steps = [(words, default | variables) for kind in calls.values() for words, variables in kind]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # compiled code
    done = python(PROGRAM, json.dumps(steps), environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    replied = map(tuple, json.loads(done.stdout))
    return {kind: [next(replied) for _ in part] for kind, part in calls.items()}


def refusal(code: int, said: str, line: str) -> str:
    assert (code, said, line.count("\n")) == (4, "", 1), line
    return line


def test_a_wrong_token_is_one_line_and_so_is_a_missing_one(ray_address: str, replies):
    for reply in replies["wrong token"]:
        line = refusal(*reply)
        assert line.startswith(
            f"error: ray.address: the cluster at {ray_address} requires a token, but the token on this"
        )
        assert "'ray get-auth-token'" in line
    assert "no token was found on this machine" in refusal(*replies["no token"][0])


def test_the_users_token_is_found_whatever_the_shell_says(replies):
    assert replies["own token"] + replies["outside"] == 2 * [(0, "1 x 4 CPU cores, 0 GPUs; 1\n", "")]
    line = refusal(*replies["other version"][0])
    assert "Ray: 1.2.3" in line and "Ray: 2.60.0" in line
    assert "another user owns it or has access to it; create a new token" in refusal(*replies["others' token"][0])


def test_a_cluster_without_tokens_is_joined_whatever_the_shell_says(replies):
    assert replies["open cluster"] == 2 * [(0, "1 x 2 CPU cores, 2 GPUs; 1\n", "")]
