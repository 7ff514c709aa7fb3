"""Start and stop the service on the current Ray cluster, or on a cluster of its own.

- SIGINT and SIGTERM: ongoing requests are finished, new ones get 503. A second signal ends the service at once.
- SIGHUP: read the settings and the weights again and replace all replicas while requests are answered. The same
  command, started again on a cluster where the service runs, does so too.

Each wait has a limit, or a signal ends it.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable

from esmeray.cluster.placement import LOCAL, find
from esmeray.cluster.signals import StopSignals
from esmeray.common.errors import ConfigError, EsmerayError, ResourceError, expanded, first_line, reading
from esmeray.common.progress import status_line
from esmeray.common.publishing import MADE_FILE
from esmeray.common.remote import local_path
from esmeray.inference.index.parts import INDEX_FILE, read_index_manifest
from esmeray.inference.models.source import check_model
from esmeray.model.export.proteinmpnn_weights import published_weights
from esmeray.service.contract import DRAIN_S
from esmeray.service.http.access import read_keys
from esmeray.service.section import ServeSection, ServiceSettings

KEEP_ALIVE_S = 75
"""Longer than the 60 s for which common proxies keep a connection. Otherwise they send into a closing connection."""
RELOAD_S = 600
"""Seconds to wait for a reload; afterwards Ray Serve continues it."""
SERVE_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "esmeray.service.http.door:middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Environment variables for Ray's processes, on a cluster of our own.

Serve's processes use fewer threads, which would wait for each other; computing has its own thread. A proxy that starts
slowly has 60 s instead of 5 s before Serve replaces it."""


def run(read: Callable[[], ServiceSettings], say: Callable[[str], None]) -> int:
    """Serve until a signal arrives.

    Args:
        read: reads the settings; called at the start and at SIGHUP.
        say: prints a line.

    Returns the exit code. Raises ConfigError for a model, key file or certificate that can't be used, ResourceError if
    the cluster has no room for the replicas.
    """
    settings = read()
    _check_files(settings.serve)
    with StopSignals(DRAIN_S) as signals:
        try:
            return _serve(settings, read, say, signals)
        except KeyboardInterrupt:  # a signal before the service was up: nothing to finish
            return signals.interrupted_code


def _serve(
    settings: ServiceSettings, read: Callable[[], ServiceSettings], say: Callable[[str], None], signals: StopSignals
) -> int:
    config = settings.serve
    # Set before the import of Ray, which reads some of them; Ray's processes inherit them.
    for name, value in SERVE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    own = find(settings.ray) == LOCAL
    if own:  # on another cluster the service may already run, and the models are on its nodes
        _check_port(config)
        _check_sources(config)
    # Imported here, so that a refusal does not wait for the import of Ray.
    from esmeray.cluster.connection import connected

    # Otherwise SIGHUP would end the process. A SIGHUP during the start causes a reload after it.
    woken = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: woken.set())
    with status_line() as show:
        show("starting Ray")
        with connected(settings.ray) as dashboard:
            from esmeray.service import running

            running.check_room(config)
            show(f"loading {', '.join(model.name for model in config.models)}")
            running.start_proxies(
                {
                    "host": config.host,
                    "port": config.port,
                    "keep_alive_timeout_s": KEEP_ALIVE_S,
                    "ssl_certfile": config.access.tls_certificate,
                    "ssl_keyfile": config.access.tls_key,
                },
                say,
            )
            try:
                problem = running.deploy(config, say, signals)
                if problem:
                    raise ConfigError(problem)
                scheme = "https" if config.access.tls_key else "http"
                show("")
                say(f"ready: {scheme}://{config.host}:{config.port}/ (page), /docs (endpoints); Ctrl-C ends it")
                if dashboard:
                    say(f"Ray's dashboard: http://{dashboard}")
                # The first signal only wakes this loop, since Serve can't be called in a signal handler. The second
                # signal interrupts any wait.
                signals.hand_over(woken.set, "ending: requests that are being answered are finished", interrupts=True)
                while signals.received is None:
                    woken.wait()
                    woken.clear()
                    if signals.received is None:  # otherwise the end has woken this loop, not SIGHUP
                        config = _reload(config, read, own, say, signals)
                running.drain(signals)
            finally:
                if not own:  # otherwise it ends with the cluster
                    running.remove(at_once=signals.expired)
    return signals.exit_code


def _reload(
    config: ServeSection,
    read: Callable[[], ServiceSettings],
    own: bool,
    say: Callable[[str], None],
    signals: StopSignals,
) -> ServeSection:
    """Replace all replicas, with settings and files as they are now; return the settings that are then served.

    If settings or files are refused, the service stays as it is.
    """
    from esmeray.service import running

    try:
        new = read().serve
        _check_files(new)
        if own:
            _check_sources(new)
        running.check_room(new, config)
        say("reloading: all replicas are replaced")
        problem = running.deploy(new, say, signals, RELOAD_S)
    except (EsmerayError, *running.SERVE_ERRORS) as error:
        say(f"not updated: {first_line(error)}")
        return config
    say(f"updated, but {problem}" if problem else "updated: all replicas were replaced")
    return new


def _check_files(config: ServeSection) -> None:
    """Raise ConfigError for keys or certificates that can't be read, before anything starts."""
    if config.access.keys is not None:
        read_keys(config.access.keys)
    for path in (config.access.tls_certificate, config.access.tls_key):
        if path is not None and not expanded(path).is_file():
            raise ConfigError(f"access: {path}: there is no such file")


def _check_port(config: ServeSection) -> None:
    # Listen and close: later Serve's proxy, another process, listens there.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise ResourceError(
            f"serve.port: the service can't listen on {config.host}:{config.port} ({reason}); choose another"
        ) from error


def _check_sources(config: ServeSection) -> None:
    """Raise ConfigError for missing models and indexes. Replicas would do so a minute later."""
    for model in config.models:
        weights = published_weights(model.source)
        if weights is not None:
            with reading(weights):
                weights.open("rb").close()
        else:
            check_model(model.source, model.random_weights, "models")
    for index in config.indexes:
        # Of a URI only the manifest is fetched. Its fingerprint is compared once the models are loaded.
        if read_index_manifest(local_path(index.source, {INDEX_FILE, MADE_FILE}.__contains__)).made_of is None:
            raise ConfigError(
                f"indexes: {index.source}: does not name the model of its vectors; make them with 'embed run'"
            )
