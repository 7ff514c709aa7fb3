"""Facts about a cluster's nodes before work begins, from one task per node, which needs no core.

Versions of packages, Esmeray's code and shared storage are compared with this process. The processors determine the
default precision.
"""

import hashlib
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from esmeray.common.errors import ResourceError, first_line
from esmeray.common.processor import cpu_computes_bf16
from esmeray.installation import PACKAGE
from esmeray.run_folder.checkpoints import installed_versions

TIMEOUT_S = 60.0


class NodeFacts(NamedTuple):
    """A node's package versions, the digest of its Esmeray code, and whether it can use the shared folder."""

    versions: dict[str, str]
    code: str
    sees: bool


def check_nodes(environment: dict[str, Any], shared: Path | None) -> None:
    """Compare every other node that has cores or GPUs with this process. Ray must be connected.

    Args:
        environment: Ray's runtime environment of the workers.
        shared: folder that every node must be able to read and write.

    A node that is lost meanwhile, or has not replied after a minute, is not checked. Raises ResourceError if a node
    differs.
    """
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if _computes_elsewhere(node)}
    if not others:
        return
    with ExitStack() as stack:
        # Look for a new file with a unique name: a node may have another folder with the same path.
        mark = (
            stack.enter_context(tempfile.NamedTemporaryFile(dir=shared, prefix=".node-check-")).name if shared else ""
        )
        here = facts(mark)
        task: Any = ray.remote(facts)
        replies = {_start(task, identity, environment, mark): address for identity, address in others.items()}
        done, _ = ray.wait(list(replies), num_returns=len(replies), timeout=TIMEOUT_S)
        for reply in done:
            if lacks := _differences(reply, here, shared):
                raise ResourceError(f"ray.address: the node {replies[reply]} {'; '.join(lacks)}")


def facts(mark: str) -> NodeFacts:
    """Return the facts of the node that runs this. ``mark`` is a file in the shared folder, or empty."""
    sees = not mark or (Path(mark).exists() and os.access(Path(mark).parent, os.W_OK))
    return NodeFacts(installed_versions(), code_digest(PACKAGE), sees)


def cpus_compute_bf16(environment: dict[str, Any]) -> bool:
    """Test whether the processors of all nodes with cores have bf16 instructions. Ray must be connected.

    ``environment``: as in :func:`check_nodes`. A node that does not reply within a minute counts as one without bf16.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    task: Any = ray.remote(cpu_computes_bf16)
    try:  # test every node, because this process may be on none of them
        return all(ray.get([_start(task, node, environment) for node in nodes], timeout=TIMEOUT_S))
    except RayError:
        return False


def code_digest(root: Path) -> str:
    """Digest of the names and contents of all Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _computes_elsewhere(node: dict[str, Any]) -> bool:
    resources = node["Resources"]
    own = None if ray.util.client.ray.is_connected() else ray.get_runtime_context().get_node_id()
    return bool(node["Alive"] and node["NodeID"] != own and (resources.get("CPU") or resources.get("GPU")))


def _start(task: Any, node: str, environment: dict[str, Any], *mark: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    # No core, because all may be in use. The task runs on this node only, and is not repeated if the node is lost.
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy, runtime_env=environment).remote(*mark)


def _differences(reply: Any, here: NodeFacts, shared: Path | None) -> list[str]:
    try:
        other = NodeFacts(*ray.get(reply))
    except RayTaskError as error:  # a missing package, or a version of Esmeray without this module
        return [f"can't run this version of Esmeray ({first_line(error.cause or error)})"]
    except RayError:
        return []
    differing = [name for name, version in here.versions.items() if other.versions.get(name) != version]
    lacks = [f"has {name} {other.versions.get(name)} (this machine: {here.versions[name]})" for name in differing]
    if other.code != here.code:
        lacks.append("has different Esmeray code (to send yours, use 'ray job submit --working-dir')")
    if not other.sees:
        lacks.append(f"has another folder at {shared}, or can't write to it (mount the same folder on every node)")
    return lacks
