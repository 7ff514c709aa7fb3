"""Commands on clusters of ``ray start``: with tokens, without, and with those that can't be used."""

import json
import os
from pathlib import Path

import pytest

from esmeray.train_config.loading import dump_config
from tests.clusters import TOKEN, python, started_cluster
from tests.runs import tiny_config

OTHER = "0" * 64
COMMANDS = {
    "train": "train --config {config}",
    "find_batch_size": "tune tokens --config {config}",
    "serve": "serve run --config train_config/serve.yaml --ray.address {address}",
    "embed": "embed run --embed.workers=1 --embed.models=esm2_t6_8M --embed.random_weights=true "
    "--embed.input {fasta} --embed.output={folder}/embeddings",
    "predict_structures": "design fold --fold.workers=1 --fold.model={folder} --fold.cache={folder}/predictions "
    "--fold.input={fasta}",
}
RUN = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from esmeray.common.command_line import run
from esmeray.tools.__main__ import main

replies = []
for words, variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as refused:
        code = run(main, words)
    replies.append([code, said.getvalue(), refused.getvalue()])
    for name in variables:
        del os.environ[name]
print(json.dumps(replies))
"""
CONNECT = """
import json, os, sys
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from esmeray.cluster.section import RaySection
from esmeray.cluster.connection import connected, hardware

for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    with connected(RaySection()):
        print(hardware())
        if "version" in sys.argv:  # the cluster's own is another from now on
            of_cluster = {"key": b"CLUSTER_METADATA", "namespace": b"cluster"}
            changed = json.loads(_internal_kv_get(**of_cluster)) | {"ray_version": "1.2.3"}
            _internal_kv_put(value=json.dumps(changed).encode(), overwrite=True, **of_cluster)
    for name in variables:
        del os.environ[name]
"""


def shell(address: str, folder: Path) -> dict[str, str]:
    """An environment on the cluster of an address, without a token, in a home folder."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    compiled = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return ours | {"RAY_ADDRESS": address, "HOME": str(folder), "XDG_CACHE_HOME": compiled}


def refusals(folder: Path, address: str, *calls: tuple[str, dict[str, str]]) -> list[str]:
    """The one line that each command is refused with on a cluster, with these variables."""
    files = {"config": folder / "config.yaml", "fasta": folder / "a.fasta", "folder": folder}
    files["config"].write_text(dump_config(tiny_config(folder, ray={"num_workers": 1})))
    files["fasta"].write_text(">a\nMKTAYIAKQR\n")
    (folder / "config.json").write_text("{}")  # of the predictor, which is not opened
    words = [(COMMANDS[name].format(**files, address=address).split(), variables) for name, variables in calls]
    done = python(RUN, json.dumps(words), environment=shell(address, folder))
    assert done.returncode == 0, done.stderr
    replies = json.loads(done.stdout)
    assert [(code, said, refused.count("\n")) for code, said, refused in replies] == [(4, "", 1)] * len(calls), replies
    return [refused for *_, refused in replies]


def keep_token(home: Path, mode: int) -> None:
    file = home / ".ray" / "auth_token"
    file.parent.mkdir(exist_ok=True)
    file.write_text(TOKEN)
    file.chmod(mode)


def test_a_wrong_token_is_one_line_of_every_command_and_so_is_a_missing_one(ray_address: str, tmp_path: Path):
    calls = [(name, {"RAY_AUTH_TOKEN": OTHER}) for name in COMMANDS]
    *wrong, missing = refusals(tmp_path, ray_address, *calls, ("train", {"RAY_AUTH_MODE": "token"}))
    for line in wrong:
        assert line.startswith(f"error: ray.address: the cluster at {ray_address} asks for Ray's token, and the one")
        assert "'ray get-auth-token'" in line
    assert "none was found here" in missing


def test_the_token_is_found_where_ray_keeps_it_whatever_the_shell_says_if_it_is_the_user_s_alone(
    ray_address: str, tmp_path: Path
):
    keep_token(tmp_path, 0o600)
    modes = json.dumps([{"RAY_AUTH_MODE": mode} for mode in ("token", "disabled")])
    done = python(CONNECT, modes, environment=shell(ray_address, tmp_path))
    assert (done.stdout, done.stderr) == ("1 x 4 CPU cores, 0 GPUs\n" * 2, "")
    keep_token(tmp_path, 0o644)
    (line,) = refusals(tmp_path, ray_address, ("train", {}))
    assert "another user owns it or has access to it; make it anew" in line


@pytest.mark.slow
def test_a_cluster_without_tokens_and_one_of_another_version(tmp_path: Path):
    said = [{"RAY_AUTH_TOKEN": TOKEN}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token"}]
    with started_cluster(1, mode="disabled") as cluster:
        done = python(CONNECT, json.dumps(said), environment=shell(cluster.address, tmp_path))
        assert (done.stdout, done.stderr) == ("1 x 1 CPU cores, 0 GPUs\n" * 3, "")
        assert python(CONNECT, "[{}]", "version", environment=shell(cluster.address, tmp_path)).returncode == 0
        (line,) = refusals(tmp_path, cluster.address, ("train", {}))
    assert "Ray: 1.2.3" in line and "Ray: 2.60.0" in line
