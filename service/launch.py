"""Start and stop of the service on the Ray cluster at hand, or one of its own.

SIGINT and SIGTERM let requests that are being answered end, while others get 503; a second one ends them. At SIGHUP the
settings and the files of the weights are looked at again, and replicas of what has changed are replaced while requests
are answered; so does the same command, started again on a cluster where the service runs.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from esmeray.cluster.placement import LOCAL, find
from esmeray.cluster.signals import StopSignals
from esmeray.common.errors import ConfigError, EsmerayError, ResourceError, expanded
from esmeray.common.progress import status_line
from esmeray.common.publishing import MADE_FILE
from esmeray.common.remote import local_path
from esmeray.common.text import first_line
from esmeray.inference.index.parts import INDEX_FILE, read_index_manifest
from esmeray.inference.models.source import check_model
from esmeray.service.contract import DRAIN_S
from esmeray.service.http.access import read_keys
from esmeray.service.section import ServeSection, ServiceSettings

KEEP_ALIVE_S = 75
"""Longer than the 60 s for which common proxies keep a connection: else they send into one that is being closed."""
PROXY_TIMEOUT_S = 300
SERVE_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "esmeray.service.http.door:middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Of Ray's processes: fewer threads in each, which would wait for each other. Computing has a thread of its own. And a
proxy that is slow is not replaced by another after 5 s, on a cluster of our own."""
_ERROR = re.compile(r"^([\w.]+(?:Error|Exception)): (.+)", re.MULTILINE)


def run(read: Callable[[], ServiceSettings], say: Callable[[str], None]) -> int:
    """Serve until a signal comes; returns the exit code. ``read`` gives the settings, at the start and at SIGHUP.

    Raises ConfigError where a model, key file or certificate can't be taken, ResourceError where the cluster has not
    what the replicas need.
    """
    settings = read()
    _check_files(settings.serve)
    with StopSignals(DRAIN_S) as signals:
        try:
            return _serve(settings, read, say, signals)
        except (KeyboardInterrupt, SystemExit) as error:  # a signal before the service was up, and nothing to finish
            signum = signals.behind(error)
            if signum is None:
                raise
            return 128 + signum


def _serve(
    settings: ServiceSettings, read: Callable[[], ServiceSettings], say: Callable[[str], None], signals: StopSignals
) -> int:
    config = settings.serve
    # Before Ray is imported, which reads some of them then; Ray's processes inherit them.
    for name, value in SERVE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    own = find(settings.ray) == LOCAL
    if own:  # on another cluster the service may run already, and its nodes have the models
        _check_here(config)
    # Here: they import Ray, which a refusal need not wait for.
    from esmeray.cluster.connection import cluster_resources, connected

    with status_line() as show:
        show("starting Ray")
        with connected(settings.ray) as dashboard:
            signals.reinstall()  # ray.init has replaced the handler of SIGTERM
            from ray import serve

            from esmeray.service.deployments import APPLICATION, application

            # Its lines of progress and of replicas would hide ours; refusals are read from its status.
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            nodes = cluster_resources()
            device = "cuda" if any(node.gpus for node in nodes) else "cpu"
            _check_resources(config, sum(node.cpus for node in nodes), sum(node.gpus for node in nodes), device)
            show(f"loading {', '.join(model.name for model in config.models)}")
            http = {
                "host": config.host,
                "port": config.port,
                "keep_alive_timeout_s": KEEP_ALIVE_S,
                "ssl_certfile": config.access.tls_certificate,
                "ssl_keyfile": config.access.tls_key,
            }
            _start_proxies(serve, http, say)
            try:
                serve.run(application(config, device), name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                status = serve.status().applications[APPLICATION]
                # Or it would stay, and be tried again, on a cluster that is not ours.
                serve.delete(APPLICATION)
                raise _deployment_error(status) from error
            problem = asyncio.run(_mismatch(APPLICATION))
            if problem:
                serve.delete(APPLICATION)
                raise ConfigError(problem)
            scheme = "https" if config.access.tls_key else "http"
            show("")
            say(f"ready: {scheme}://{config.host}:{config.port}/ (page), /docs (endpoints); Ctrl-C ends it")
            if dashboard:
                say(f"Ray's dashboard: http://{dashboard}")
            # Signals only wake this loop: a handler runs in the midst of anything, where Serve can't be called.
            woken = threading.Event()
            signal.signal(signal.SIGHUP, lambda *_: woken.set())
            signals.hand_over(woken.set, "ending: requests that are being answered are finished")
            while signals.received is None:
                woken.wait()
                woken.clear()
                if signals.received is None:  # else the end has woken us, not SIGHUP
                    say(_updated(serve, lambda: application(read().serve, device), APPLICATION))
            asyncio.run(_end(serve, APPLICATION, own, signals))
    return signals.exit_code


def _start_proxies(serve: Any, options: dict[str, Any], say: Callable[[str], None]) -> None:
    """Start Serve, and wait for its proxies longer than Serve (2.60) does, which gives them 60 s."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        serve.start(http_options=options, proxy_location="EveryNode")
        return
    except RayTaskError as error:  # of the proxy itself, as on another cluster where the port is taken
        serve.shutdown()
        raise ResourceError(
            f"serve.port: {first_line(error.cause or error)}; choose another by --serve.port"
        ) from error
    except (TimeoutError, RayActorError):  # one that takes too long is replaced by Serve
        say("Ray Serve's proxy is slow to come up: waiting for it")
    deadline_s = time.monotonic() + PROXY_TIMEOUT_S
    while set(serve.status().proxies.values()) != {"HEALTHY"}:
        if time.monotonic() > deadline_s:
            raise ResourceError(f"Ray Serve's proxy did not come up in {PROXY_TIMEOUT_S} s; see Serve's logs")
        time.sleep(0.5)


async def _end(serve: Any, name: str, own: bool, signals: StopSignals) -> None:
    """End the service once what is being answered is answered, within the time that the signals leave.

    As soon as the application is deleted, Serve's proxy answers 404, which clients take for final; so every ingress
    refuses with 503 first. A cluster of our own, and Serve where nobody else uses it, end with their proxies.
    """
    applications = set(serve.status().applications)
    if name in applications:
        replies = serve.get_app_handle(name).broadcast("drain").results_async(return_exceptions=True)
        drained = asyncio.gather(replies, return_exceptions=True)
        # In short waits: a second signal ends the time that is left.
        while not drained.done() and not signals.expired:
            await asyncio.wait([drained], timeout=0.1)
    if applications - {name}:  # of others, whose Serve it is too
        serve.delete(name)
    elif not own:
        await serve.shutdown_async()  # in the loop of the handle, which it closes


def _updated(serve: Any, made: Callable[[], Any], name: str) -> str:
    """Deploy the settings as they are now; what can't be taken leaves the service as it is."""
    try:
        serve.run(made(), name=name, route_prefix="/")
    except EsmerayError as error:
        return f"not updated: {error}"
    except RuntimeError:
        return f"not updated: {_deployment_error(serve.status().applications[name])}"
    problem = asyncio.run(_mismatch(name))
    return f"updated, but {problem}" if problem else "updated: replicas of what has changed were replaced"


async def _mismatch(name: str) -> str:
    """The indexes and their models, now that both are loaded: only then their fingerprints are known."""
    from ray.exceptions import RayError
    from ray.serve.handle import DeploymentHandle

    # A new one: that of serve.get_app_handle (2.60) stays with the event loop of its first call, which has ended.
    ingress: Any = DeploymentHandle("ingress", name)
    try:
        problem: str = await ingress.mismatch.remote()
    except RayError as error:  # of an ingress that was lost: the service continues, and each search compares as well
        problem = f"its indexes and models could not be compared: {first_line(error)}"
    return problem


def _check_files(config: ServeSection) -> None:
    """Refuse what can be seen before anything is started."""
    if config.access.keys is not None:
        read_keys(config.access.keys)
    for path in (config.access.tls_certificate, config.access.tls_key):
        if path is not None and not expanded(path).is_file():
            raise ConfigError(f"access: {path}: there is no such file")


def _check_here(config: ServeSection) -> None:
    """Refuse a port that is taken, and models and indexes that are not there, as replicas do a minute later."""
    # Tried and closed again: Serve's proxy, another process, will listen there.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise ResourceError(
            f"serve.port: the service can't listen on {config.host}:{config.port} ({reason}); choose another"
        ) from error
    for model in config.models:
        check_model(model.source, model.random_weights, "models")
    for index in config.indexes:
        # Of a URI the manifest alone; what model its fingerprint stands for is known once the served ones are loaded.
        folder = local_path(index.source, lambda name: name in (INDEX_FILE, MADE_FILE))
        if read_index_manifest(folder).made_of is None:
            raise ConfigError(f"indexes: {index.source}: does not name its vectors' model; make them by 'embed run'")


def _check_resources(config: ServeSection, cpus: int, gpus: int, device: str) -> None:
    # Serve would wait for more without end, and say so only in its own log.
    needed_cpus = sum(model.cpus * model.replicas for model in config.models)
    needed_cpus += sum(index.cpus * index.replicas for index in config.indexes)
    needed_gpus = sum(model.gpus * model.replicas for model in config.models if (model.device or device) == "cuda")
    if needed_cpus > cpus or needed_gpus > gpus:
        raise ResourceError(
            f"models, indexes: their replicas need {needed_cpus} CPU cores and {needed_gpus:g} GPUs, the cluster has "
            f"{cpus} and {gpus}; lower cpus, gpus or replicas"
        )


def _deployment_error(status: Any) -> ConfigError | ResourceError:
    """The refusal that a replica ended with, which Serve hands on as the text of a traceback."""
    texts = [status.message, *(deployment.message for deployment in status.deployments.values())]
    errors = _ERROR.findall("\n".join(texts))
    if not errors:
        return ConfigError(f"models: can't be served: {' '.join(texts[-1].split()) or 'see the logs of Ray Serve'}")
    kind, text = errors[-1]  # of a chain of errors the one that was raised last
    if kind.endswith("ResourceError"):
        return ResourceError(text)
    # An error of a library, as of one that opens weights, says nothing without its type.
    return ConfigError(text if "esmeray.common.errors" in kind else f"models: {kind}: {text}")
