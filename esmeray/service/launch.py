"""Start and stop of the service on the Ray cluster at hand, or one of its own.

SIGINT and SIGTERM let requests that are being answered end, while others get 503; a second one ends the service at
once. SIGHUP reads the settings and the weights again and replaces all replicas while requests are answered; so does the
same command, started again on a cluster where the service runs. Each wait has a limit, or is broken off by a signal.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable

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
RELOAD_S = 600
"""Seconds that a reload is watched; Ray Serve continues it."""
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
        _check_port(config)
        _check_sources(config)
    # Here: they import Ray, which a refusal need not wait for.
    from esmeray.cluster.connection import connected

    # SIGHUP would end the process otherwise. What it asks for during the start is done after it.
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
                # The first signal only wakes this loop: a handler runs in the midst of anything, where Serve can't be
                # called. The second one breaks off whatever is waited for.
                signals.hand_over(woken.set, "ending: requests that are being answered are finished", interrupts=True)
                while signals.received is None:
                    woken.wait()
                    woken.clear()
                    if signals.received is None:  # else the end has woken us, not SIGHUP
                        config = _reload(config, read, own, say, signals)
                running.drain(signals)
            finally:
                if not own:  # where the application would stay
                    running.remove(at_once=signals.expired)
    return signals.exit_code


def _reload(
    config: ServeSection,
    read: Callable[[], ServiceSettings],
    own: bool,
    say: Callable[[str], None],
    signals: StopSignals,
) -> ServeSection:
    """Replace all replicas, by settings and files as they are now; returns the settings that are served then.

    Settings or files that are refused leave the service as it is.
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
    """Refuse what can be seen before anything is started."""
    if config.access.keys is not None:
        read_keys(config.access.keys)
    for path in (config.access.tls_certificate, config.access.tls_key):
        if path is not None and not expanded(path).is_file():
            raise ConfigError(f"access: {path}: there is no such file")


def _check_port(config: ServeSection) -> None:
    # Tried and closed again: Serve's proxy, another process, will listen there.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise ResourceError(
            f"serve.port: the service can't listen on {config.host}:{config.port} ({reason}); choose another"
        ) from error


def _check_sources(config: ServeSection) -> None:
    """Refuse models and indexes that are not there, as replicas do a minute later."""
    for model in config.models:
        check_model(model.source, model.random_weights, "models")
    for index in config.indexes:
        # Of a URI the manifest alone; what model its fingerprint stands for is known once the served ones are loaded.
        if read_index_manifest(local_path(index.source, {INDEX_FILE, MADE_FILE}.__contains__)).made_of is None:
            raise ConfigError(f"indexes: {index.source}: does not name its vectors' model; make them by 'embed run'")
