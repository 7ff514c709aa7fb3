"""The service on Ray Serve: a deployment for each model and index, whose files give it a version, and the ingress.

A changed version replaces the replicas one after the other. ``build`` is what ``serve run`` and a RayService import.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from esmeray.cluster.connection import default_precision
from esmeray.service.contract import DRAIN_S
from esmeray.service.http.app import build_app
from esmeray.service.http.metrics import Metrics
from esmeray.service.http.models import Call, IndexCall, Models
from esmeray.service.replicas.index_replica import IndexReplica
from esmeray.service.replicas.replica import ModelReplica, by_queued_tokens, set_up_process
from esmeray.service.section import ServedIndex, ServedModel, ServeSection, ServiceSettings
from esmeray.train_config.loading import load_settings
from esmeray.train_config.natures import with_absolute_paths

APPLICATION = "esmeray"
ONGOING = 1024
"""Calls of a replica at once: enough for full batches of single sequences. Serve's default of 5 never fills one."""
_LOGGING = {"enable_access_log": False}  # the guard writes a line for each request
LOST = (RayActorError, WorkerCrashedError, DeploymentUnavailableError)
"""Errors of a call whose replica ended, is unreachable, or has not started."""


class Ingress:
    """The deployment of the HTTP application."""

    def __init__(
        self,
        config: dict[str, Any],
        handles: dict[str, DeploymentHandle],
        indexes: dict[str, DeploymentHandle],
    ) -> None:
        set_up_process()
        calls = {
            name: Call(_cancellable(handle.about), _cancellable(handle.run), _cancellable(handle.tokens))
            for name, handle in handles.items()
        }
        index_calls = {
            name: IndexCall(_cancellable(handle.about), _cancellable(handle.run)) for name, handle in indexes.items()
        }
        self._models = Models(calls, Metrics(), LOST, (BackPressureError,), index_calls)
        self._app = build_app(
            ServeSection(**config),
            self._models,
            adds_request_id=False,  # Serve's proxy adds the header itself
        )

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def mismatch(self) -> str:
        """See :meth:`esmeray.service.http.models.Models.mismatch`."""
        return await self._models.mismatch()

    async def drain(self) -> None:
        """Refuse what comes from now on with 503; returns when what came before is answered."""
        self._app.draining = True
        while self._app.ongoing:
            await asyncio.sleep(0.05)


def application(config: ServeSection, device: str) -> serve.Application:
    """The application for Serve; models without a device of their own get this one."""
    config = with_absolute_paths(config)  # Ray starts replicas in other folders
    handles = {model.name: _model_deployment(model, model.device or device) for model in config.models}
    indexes = {
        index.name: _deployment(IndexReplica, index, index.model or config.models[0].name, num_replicas=index.replicas)
        for index in config.indexes
    }
    decorated = serve.deployment(
        name="ingress",
        num_replicas=config.ingress_replicas,
        # It shares the cores that the replicas reserve: a service of one core would find no room for it.
        ray_actor_options={"num_cpus": 0},
        # More than the guard admits, so that it refuses with a reason, and Serve's proxy does not queue.
        max_ongoing_requests=2 * config.limits.requests,
        graceful_shutdown_timeout_s=DRAIN_S,
        # A successor starts first: it reserves nothing, and without an ingress requests would wait.
        max_surge_percent=100,
        logging_config=_LOGGING,
    )
    return decorated(serve.ingress()(Ingress)).bind(config.model_dump(mode="json"), handles, indexes)


def build(arguments: dict[str, str]) -> serve.Application:
    """For ``serve run esmeray.service.deployments:build config=FILE`` and RayService. ``device`` is cpu or cuda."""
    return application(load_settings(ServiceSettings, arguments["config"]).serve, arguments.get("device", "cpu"))


def _cancellable(method: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A replica's method. Serve lets it run on where the task that waits for it is cancelled, as at a 504."""

    async def call(*arguments: Any) -> Any:
        response = method.remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    return call


def _model_deployment(model: ServedModel, device: str) -> serve.Application:
    # Else each replica takes the default of the model's task, which only its files say.
    if model.precision is None and default_precision(device == "cuda") == "fp32":
        model = model.model_copy(update={"precision": "fp32"})
    scaling = {
        "min_replicas": model.replicas,
        "max_replicas": model.max_replicas,
        "policy": {"policy_function": by_queued_tokens},
    }
    return _deployment(
        ModelReplica,
        model,
        device,
        num_gpus=model.gpus if device == "cuda" else 0,
        # Serve takes one of the two, and refuses both.
        **({"num_replicas": model.replicas} if model.max_replicas is None else {"autoscaling_config": scaling}),
    )


def _deployment(
    kind: type, served: ServedModel | ServedIndex, argument: str, *, num_gpus: float = 0, **number: Any
) -> serve.Application:
    """The replicas of a model or an index; ``argument`` of their class stands between settings and version."""
    decorated = serve.deployment(
        name=served.name,
        ray_actor_options={"num_cpus": served.cpus, "num_gpus": num_gpus},
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=2.0,  # by default 10, until which requests go to one that is lost
        # A changed version: a single replica serves until its successor is loaded, of several one ends first.
        max_surge_percent=100 if served.replicas == 1 else 0,
        logging_config=_LOGGING,
        **number,
    )
    # Each deployment, at the start and at SIGHUP, is a version, which takes the files as they are, also of a hub name.
    return decorated(kind).bind(served.model_dump(mode="json"), argument, secrets.token_hex(8))
