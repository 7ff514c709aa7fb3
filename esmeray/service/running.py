"""The service's application on the connected Ray Serve: check for room, deploy, drain, remove.

All waits have a limit or end at a signal. ``serve.run`` (2.60) has no limit, and would ignore signals while an
application does not start.
"""

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from esmeray.cluster.signals import StopSignals
from esmeray.common.errors import ConfigError, ResourceError, first_line
from esmeray.service.deployments import APPLICATION, application
from esmeray.service.section import ServeSection

PROXY_TIMEOUT_S = 300
SLOW_S = 60
"""Seconds until a line tells what the replicas wait for."""
COMPARE_S = 10
SERVE_ERRORS = (RayError, RayServeException, TimeoutError)
"""Errors of Ray Serve or its processes."""
_ERROR = re.compile(r"^([\w.]+(?:Error|Exception)): (.+)", re.MULTILINE)

# Serve's own lines would hide ours; refusals are read from its status.
logging.getLogger("ray.serve").setLevel(logging.ERROR)


def start_proxies(options: dict[str, Any], say: Callable[[str], None]) -> None:
    """Start Serve, and wait for its proxies longer than the 60 s of Serve 2.60."""
    try:
        serve.start(http_options=options, proxy_location="EveryNode")
        return
    except RayTaskError as error:  # from the proxy, e.g. if the port is taken on another cluster
        serve.shutdown()
        raise ResourceError(
            f"serve.port: {first_line(error.cause or error)}; choose another with --serve.port"
        ) from error
    except (TimeoutError, RayActorError):  # Serve replaces a proxy that takes too long
        say("Ray Serve's proxy is slow to come up: waiting for it")
    deadline_s = time.monotonic() + PROXY_TIMEOUT_S
    while set(serve.status().proxies.values()) != {"HEALTHY"}:
        if time.monotonic() > deadline_s:
            raise ResourceError(f"Ray Serve's proxy did not come up in {PROXY_TIMEOUT_S} s; see Serve's logs")
        time.sleep(0.5)


def check_room(config: ServeSection, running: ServeSection | None = None) -> None:
    """Raise ResourceError if the cluster has no room for the replicas, or for replicas that replace ``running``.

    Serve would wait for room forever. It starts the successor of a single replica before it ends the replica, one model
    after the other if there is room for one successor only. Of several replicas it ends one first.
    """
    new = _reserved(config)
    old = _reserved(running) if running else {}
    amounts = ray.available_resources() if running else ray.cluster_resources()
    for unit, noun, setting in ("CPU", "CPU cores", "cpus"), ("GPU", "GPUs", "gpus"):
        added = (max(0.0, amount - old.get(key, 0.0)) for key, amount in new.items() if key[1] == unit)
        replaced = (
            min(new.get((served.name, unit), 0.0), old.get((served.name, unit), 0.0))
            for served in config.served
            if served.replicas == 1
        )
        needed = sum(added) + max(replaced, default=0.0)
        if needed > amounts.get(unit, 0.0) + 1e-6:  # amounts are multiples of 0.0001
            replicas = "successors, which start before the replicas end," if running else "replicas"
            raise ResourceError(
                f"models, indexes: their {replicas} need {needed:g} {noun}, {amounts.get(unit, 0.0):g} are free; "
                f"start the service with lower {setting} (0.5 is possible) or fewer replicas in its settings file"
            )


def deploy(
    config: ServeSection, say: Callable[[str], None], signals: StopSignals, limit_s: float = float("inf")
) -> str:
    """Deploy the settings and wait until all replicas are loaded; return the problem with the indexes, or ''.

    Raises the ConfigError or ResourceError of a replica that can't start, and ResourceError at a signal or the limit.
    """
    (ingress,) = serve.run_many(
        [serve.RunTarget(application(config, _device()), APPLICATION, "/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    if not ingress.is_initialized:  # Serve keeps it for later calls, also for serve.get_app_handle
        # With the loop of Serve's own thread. In Serve 2.60 a handle stays with the loop of its first call, and logs
        # errors once that loop has ended, as after asyncio.run.
        ingress._init(_run_router_in_separate_loop=True)
    start_s = time.monotonic()
    is_slow = False
    status = serve.status().applications[APPLICATION]
    while status.status not in ("RUNNING", "DEPLOY_FAILED"):
        waited_s = time.monotonic() - start_s
        messages = " ".join(deployment.message for deployment in status.deployments.values()).strip()
        problem = f"replicas are not ready after {waited_s:.0f} s. {messages}".rstrip()
        if signals.received or waited_s > limit_s:
            raise ResourceError(problem)
        if waited_s > SLOW_S and not is_slow:
            say(problem)
            is_slow = True
        time.sleep(0.2)
        status = serve.status().applications[APPLICATION]
    if status.status == "DEPLOY_FAILED":
        raise deployment_error(status)
    # The fingerprints of models and indexes are known only now.
    try:
        problem = ingress.mismatch.remote().result(timeout_s=COMPARE_S)
    except SERVE_ERRORS as error:  # e.g. the ingress was lost: the service continues, and each search compares too
        problem = f"its indexes and models could not be compared: {first_line(error)}"
    return str(problem)


def drain(signals: StopSignals) -> None:
    """Refuse new requests with 503, and wait for ongoing ones as long as the signals leave time.

    Once the application is removed, Serve's proxy answers 404, which clients take for final.
    """
    while not signals.expired:
        with suppress(*SERVE_ERRORS):
            # Repeated, since an interrupted reload may start another ingress meanwhile.
            serve.get_app_handle(APPLICATION).broadcast("drain").results(timeout_s=0.5)
            ingress = serve.status().applications[APPLICATION].deployments["ingress"]
            if "STOPPING" not in ingress.replica_states:  # an ingress that a reload has just replaced may still answer
                return
        time.sleep(0.2)


def remove(at_once: bool = False) -> None:
    """Remove the application from the cluster. Remove Serve too, if no other application uses it and there is time."""
    if at_once or set(serve.status().applications) - {APPLICATION}:
        serve.delete(APPLICATION, _blocking=False)
        serve.status()  # returns once the deletion has arrived
    else:
        # Without deleting the application first: the proxy would answer 404 until it ends.
        serve.shutdown()


def deployment_error(status: Any) -> ConfigError | ResourceError:
    """Return the error that ended a replica, which Serve passes on as the text of a traceback."""
    texts = [status.message, *(deployment.message for deployment in status.deployments.values())]
    errors = _ERROR.findall("\n".join(texts))
    if not errors:
        return ConfigError(f"models: can't be served: {' '.join(texts[-1].split()) or 'see the logs of Ray Serve'}")
    kind, text = errors[-1]  # the last one raised of a chain
    if kind.endswith("ResourceError"):
        return ResourceError(text)
    # An error of a library, e.g. one that opens weights, needs its type to be understood.
    return ConfigError(text if "esmeray.common.errors" in kind else f"models: {kind}: {text}")


def _device() -> str:
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"


def _reserved(config: ServeSection) -> dict[tuple[str, str], float]:
    """Return the CPU cores and GPUs of all replicas of each model and index, by name and unit."""
    cores = {(served.name, "CPU"): served.cpus * served.replicas for served in config.served}
    on_gpu = [model for model in config.models if (model.device or _device()) == "cuda"]
    return cores | {(model.name, "GPU"): model.gpus * model.replicas for model in on_gpu}
