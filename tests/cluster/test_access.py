"""Commands on clusters of ``ray start``: with tokens, without, and with those that can't be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from esmeray.train_config.loading import dump_config
from tests.clusters import TOKEN, started_cluster
from tests.conftest import REPOSITORY
from tests.runs import tiny_config

OTHER = "0" * 64
EMBED = ["--embed.workers=1", "--embed.models=esm2_t6_8M", "--embed.random_weights=true", "--embed.input", "{fasta}"]
FOLD = ["--fold.workers=1", "--fold.model={folder}", "--fold.cache={folder}/predictions", "--fold.input={fasta}"]
COMMANDS = {
    "train": ["train_ray.py", "--config", "{config}"],
    "find_batch_size": ["-m", "esmeray.tools", "tune", "tokens", "--config", "{config}"],
    "serve": ["serve_ray.py", "--config", "train_config/serve.yaml", "--ray.address", "{address}"],
    "embed": ["-m", "esmeray.tools", "embed", "run", *EMBED],
    "predict_structures": ["-m", "esmeray.tools", "design", "fold", *FOLD],
}


def run(folder: Path, name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command in an environment, on the cluster of RAY_ADDRESS there."""
    places = {"config": folder / "config.yaml", "fasta": folder / "a.fasta", "folder": folder}
    places["address"] = environment["RAY_ADDRESS"]
    places["config"].write_text(dump_config(tiny_config(folder, ray={"num_workers": 1})))
    places["fasta"].write_text(">a\nMKTAYIAKQR\n")
    (folder / "config.json").write_text("{}")  # of the predictor, which is not opened
    written = {"embed": ["--embed.output={folder}/embeddings"]}
    parts = [part.format(**places) for part in [*COMMANDS[name], *written.get(name, [])]]
    command = [sys.executable, *parts]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def shell(address: str, **variables: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return ours | {"RAY_ADDRESS": address} | variables


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_token_is_one_line_of_every_command(name: str, ray_address: str, tmp_path: Path):
    done = run(tmp_path, name, shell(ray_address, RAY_AUTH_TOKEN=OTHER))
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"error: ray.address: the cluster at {ray_address} asks for Ray's token, and the one")
    assert done.stderr.count("\n") == 1 and "'ray get-auth-token'" in done.stderr


def test_a_missing_token_is_one_line(ray_address: str, tmp_path: Path):
    done = run(tmp_path, "train", shell(ray_address, HOME=str(tmp_path), RAY_AUTH_MODE="token"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "none was found here" in done.stderr and done.stderr.count("\n") == 1


CONNECT = """
from esmeray.cluster.section import RaySection
from esmeray.cluster.connection import connected, hardware

with connected(RaySection()):
    print(hardware())
"""
OTHER_VERSION = """
import json
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from esmeray.cluster.section import RaySection
from esmeray.cluster.connection import connected

with connected(RaySection()):
    of_cluster = {"key": b"CLUSTER_METADATA", "namespace": b"cluster"}
    changed = json.loads(_internal_kv_get(**of_cluster)) | {"ray_version": "1.2.3"}
    _internal_kv_put(value=json.dumps(changed).encode(), overwrite=True, **of_cluster)
"""


def python(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_the_token_is_found_where_ray_keeps_it_whatever_the_shell_says(mode: str, ray_address: str, tmp_path: Path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    (tmp_path / ".ray" / "auth_token").chmod(0o600)
    done = python(CONNECT, shell(ray_address, HOME=str(tmp_path), RAY_AUTH_MODE=mode))
    assert (done.stdout, done.stderr) == ("1 x 4 CPU cores, 0 GPUs\n", "")


def test_a_token_in_the_home_folder_that_others_can_read_is_one_line(ray_address: str, tmp_path: Path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    (tmp_path / ".ray" / "auth_token").chmod(0o644)
    done = run(tmp_path, "train", shell(ray_address, HOME=str(tmp_path)))
    assert (done.returncode, done.stdout) == (4, "")
    assert "another user owns it or has access to it; make it anew" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_cluster_without_tokens_and_one_of_another_version(tmp_path: Path):
    with started_cluster(1, mode="disabled") as cluster:
        for said in ({"RAY_AUTH_TOKEN": TOKEN}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token"}):
            done = python(CONNECT, shell(cluster.address, HOME=str(tmp_path), **said))
            assert (done.stdout, done.stderr) == ("1 x 1 CPU cores, 0 GPUs\n", "")
        assert python(OTHER_VERSION, shell(cluster.address)).returncode == 0
        done = run(tmp_path, "train", shell(cluster.address))
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1 and "Ray: 1.2.3" in done.stderr and "Ray: 2.60.0" in done.stderr
