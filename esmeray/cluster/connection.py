"""Connection to a Ray cluster: connect to an available one or start a local one, and report its resources."""

import json
import logging
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray._private.worker import BaseContext
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from esmeray.cluster.access import authentication_mode, own_token
from esmeray.cluster.nodes import check_nodes, cpus_compute_bf16
from esmeray.cluster.placement import LOCAL, Capacity, NodeResources, Workers, described_nodes, find, local_resources
from esmeray.cluster.section import RaySection
from esmeray.common.command_line import kept_from_children
from esmeray.common.errors import ResourceError, first_line, shortened
from esmeray.common.own_folders import ray_folder
from esmeray.common.publishing import take_lock
from esmeray.common.remote import VARIABLE
from esmeray.installation import PACKAGE, python_path

START_TIMEOUT_S = 300
"""Seconds that workers may take to be placed and to import their modules."""

OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Size of a local cluster's object store. Batches do not pass through it, so it can be small."""

MAX_CHARACTERS = 800
"""Maximum length of Ray's reason in an error. If the dashboard fails to start, the reason has twenty lines of a log,
whose path comes first and whose error comes last."""


def cluster_resources() -> list[NodeResources]:
    return [_resources(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def default_precision(on_cuda: bool) -> Literal["bf16", "fp32"]:
    """Default precision of a computation on the connected cluster. It depends on the nodes, not on this machine.

    All nodes get the same precision, because a result must not depend on the node that computes it.
    """
    return "bf16" if on_cuda or cpus_compute_bf16(worker_environment()) else "fp32"


def capacity(workers: Workers) -> Capacity:
    """Number of Ray Train workers that the cluster has room for, including workers that this process has started.

    Raises ResourceError if the cluster does not answer.
    """
    try:
        if ray.util.client.ray.is_connected():  # a Ray Client (ray://) has to ask the cluster
            task = ray.remote(num_cpus=0, runtime_env=worker_environment())(_machines)
            machines = ray.get(task.remote())
        else:
            machines = _machines()
    except (RayError, RuntimeError) as error:
        raise ResourceError(f"the Ray cluster does not answer ({first_line(error)})") from error
    staying = [machine for machine in machines if not machine.draining]
    whole = [_resources(machine.resources) for machine in staying]
    # Resources of this job's own workers count as free: these workers end before a new number of workers starts.
    now = [
        _resources(machine.free, machine.workers * workers.cpus_each, machine.workers * workers.use_gpu)
        for machine in staying
    ]
    leaving = tuple(machine.address for machine in machines if machine.draining and machine.workers)
    return Capacity(workers.largest(now), workers.largest(whole), described_nodes(whole), leaving)


@contextmanager
def requested_machines(workers: Workers) -> Iterator[None]:
    """Request machines for the maximum number of workers from the cluster's autoscaler, if any, during the block.

    Ray requests resources for waiting tasks itself. Additional workers are not waiting tasks, so they need a request.
    """
    if not workers.sizes or ray.util.client.ray.is_connected():  # Ray (2.60) can request from within the cluster only
        yield
        return
    bundle = {"CPU": workers.cpus_each} | ({"GPU": 1} if workers.use_gpu else {})
    request_resources(bundles=[bundle] * workers.sizes[-1])
    try:
        yield
    finally:
        with suppress(Exception):  # the head node may be lost, and the request with it
            request_resources(bundles=[])


class _Machine(NamedTuple):
    """A machine of the cluster. ``workers``: number of this job's Ray Train workers on it."""

    address: str
    resources: dict[str, float]
    free: dict[str, float]
    draining: bool
    workers: int


def _machines() -> list[_Machine]:
    state = ray._private.state.state  # the only source of free resources per node and of draining nodes in Ray (2.60)
    draining, free = state.get_draining_nodes(), state.available_resources_per_node()
    actors = state.actor_table(None, None, "ALIVE").values()
    job = ray.get_runtime_context().get_job_id()
    own_workers = [actor for actor in actors if (actor["JobID"], actor["ActorClassName"]) == (job, "RayTrainWorker")]
    workers = Counter(actor["Address"]["NodeID"] for actor in own_workers)
    return [
        _Machine(node["NodeManagerAddress"], node["Resources"], free.get(name, {}), name in draining, workers[name])
        for node in ray.nodes()
        if node["Alive"] and _answers(node) and (name := node["NodeID"])
    ]


def _answers(node: dict[str, Any]) -> bool:
    """Test whether a machine answers. Ray (2.60) lists a lost machine as alive until 15 s of health checks failed."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=1.0).close()
    except OSError:
        return False
    return True


def _resources(resources: dict[str, float], cpus: int = 0, gpus: int = 0) -> NodeResources:
    return NodeResources(int(resources.get("CPU", 0)) + cpus, int(resources.get("GPU", 0)) + gpus)


def worker_environment() -> dict[str, Any]:
    """Ray's runtime environment of actors and workers, in addition to the job's environment, which has the code."""
    storage = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
    return {"env_vars": {"PYTHONPATH": python_path(), "TOKENIZERS_PARALLELISM": "false"} | storage}


@contextmanager
def connected(section: RaySection, shared: Path | None = None) -> Iterator[str]:
    """Connect, or start a local cluster, during the block. Yields the dashboard's address, or ''.

    A cluster that was started here is stopped at the end. A process that was connected before stays connected. Raises
    ResourceError if nothing answers at ``ray.address``, or if a node has other versions or can't use ``shared``.
    """
    # Ray Train polls for lost workers, every 2 s by default.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    # esmeray/training/launch/elastic.py watches for machines that will be preempted, without an additional process.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    connected_before = ray.is_initialized()
    if connected_before and section.address in (None, ray.get_runtime_context().gcs_address):
        yield ""
        return
    address = find(section)
    variables = _authentication(address)
    remark = " (dashboard login: run 'ray get-auth-token --generate' first)" if "RAY_AUTH_TOKEN" in variables else ""
    with _environment(variables):
        try:
            try:
                context = _start_local() if address == LOCAL else _join(address)
            except Exception as error:  # Ray (2.60) raises Exception itself if a start fails or takes too long
                where = "could be started" if address == LOCAL else f"could be used at {address}"
                raise ResourceError(
                    f"ray.address: no Ray cluster {where} ({shortened(str(error), MAX_CHARACTERS)})"
                ) from error
            check_nodes(worker_environment(), shared)
            yield f"{context.dashboard_url}{remark}" if context.dashboard_url else ""
        finally:  # also if a signal interrupts the start
            if not connected_before:
                ray.shutdown()


def _authentication(address: str) -> dict[str, str]:
    """Environment variables that make Ray use the cluster's authentication mode instead of the shell's.

    A cluster that is started here uses the token that Ray finds, otherwise a new one that is not written to disk. Ray
    (2.60) would write it to the user's token file, and then every later 'ray start' would require it.
    """
    if address != LOCAL:
        return {"RAY_AUTH_MODE": authentication_mode(address)}
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    own = {} if mode != "token" or own_token() else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {"RAY_AUTH_MODE": mode, **own}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for Ray during the block, in this process and in processes that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    Config.initialize("")  # reload: Ray read them when it was imported
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _start_local() -> BaseContext:
    # The same resources as in the placement of workers, which is done before Ray starts.
    ((cpus, gpus),) = local_resources()
    # A lock, because two clusters that start at once would choose the same port.
    folder = ray_folder()
    with _loopback(), _own_signals(), closing(take_lock(folder.with_name("starting.lock"))):
        return ray.init(
            address=LOCAL,
            _temp_dir=str(folder),
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=OBJECT_STORE_BYTES,
            # Without a dashboard, Ray Train's cleaner (Ray 2.60) warns every second.
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextmanager
def _loopback() -> Iterator[None]:
    """Make a cluster that is started in the block listen on 127.0.0.1 only.

    Ray (2.60) listens on every address, except on systems without multi-node clusters, which these variables simulate.
    _node_ip_address='127.0.0.1' does not help: Ray replaces it with the machine's external address.
    """
    constants = ray._private.ray_constants
    enabled, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        # Prestarted workers have no runtime environment, so that our workers could not use them.
        with _environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_prestart_worker_first_driver": "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled


@contextmanager
def _own_signals() -> Iterator[None]:
    """Let only this process handle signals to all processes of a job, with its own handlers.

    Ray (2.60) shields a cluster that is started in the block from SIGINT only. Any other signal to the process group
    would end the workers before they can save. ray.init, also for a running cluster, sets a SIGTERM handler that exits
    with code 1.
    """
    handler = signal.getsignal(signal.SIGTERM)
    with kept_from_children():
        try:
            yield
        finally:
            with suppress(ValueError):  # raised outside the main thread, where Ray sets no handler either
                signal.signal(signal.SIGTERM, handler)


def _init(**arguments: Any) -> BaseContext:
    """Connect in up to 3 attempts: one Ray Client server (2.60) in ten dies when forked (ray-project/ray#63202)."""
    with _own_signals():
        for _ in range(2):
            with suppress(ConnectionAbortedError):
                return ray.init(**arguments)
        return ray.init(**arguments)


def _join(address: str) -> BaseContext:
    quietly: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    context = _init(**quietly)
    of_job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env", {})
    if len(cluster_resources()) == 1 or "working_dir" in of_job:  # 'ray job submit --working-dir' has uploaded it
        return context
    # Other machines need this code. Ray (2.60) uploads a folder only as part of a job's runtime environment.
    ray.shutdown()
    return _init(**quietly, runtime_env={"py_modules": [str(PACKAGE)], "excludes": ["**/__pycache__"]})


def hardware() -> str:
    """Description of the connected cluster's machines, to detect changes of hardware."""
    machines = Counter(_described(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return "; ".join(f"{count} x {machine}" for machine, count in sorted(machines.items()))


def _described(resources: dict[str, float]) -> str:
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    gpus = f"{resources.get('GPU', 0):g} GPUs" + (f" ({', '.join(sorted(kinds))})" if kinds else "")
    return f"{resources.get('CPU', 0):g} CPU cores, {gpus}"
