"""The service on Ray Serve: one deployment per model and index, and the ingress.

Each deployment has a version; a new version replaces the replicas one after the other. ``serve run`` and a RayService
import :func:`build`.
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
from esmeray.service.contract import DRAIN_S, REQUESTS
from esmeray.service.http.app import build_app
from esmeray.service.http.models import Call, Models
from esmeray.service.replicas.index_replica import IndexReplica
from esmeray.service.replicas.replica import ModelReplica, by_queued_tokens, set_up_process
from esmeray.service.section import ServedIndex, ServedModel, ServeSection, ServiceSettings
from esmeray.train_config.loading import load_settings
from esmeray.train_config.section import with_absolute_paths

APPLICATION = "esmeray"
ONGOING = 1024
"""Maximum number of concurrent calls of a replica: enough for full batches of single sequences. Serve's default: 5."""
_LOGGING = {"enable_access_log": False}  # the guard writes a line for each request
LOST = (RayActorError, WorkerCrashedError, DeploymentUnavailableError)
"""Errors of a call if its replica ended, is unreachable, or has not started."""


class Ingress:
    """Deployment of the HTTP application."""

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
            name: Call(_cancellable(handle.about), _cancellable(handle.run)) for name, handle in indexes.items()
        }
        self._models = Models(calls, LOST, (BackPressureError,), index_calls)
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
        """Refuse new requests with 503; return once all earlier requests are answered."""
        self._app.draining = True
        while self._app.ongoing:
            await asyncio.sleep(0.05)


def application(config: ServeSection, device: str) -> serve.Application:
    """Build the application for Serve. ``device`` is the default for models that name none."""
    config = with_absolute_paths(config)  # Ray starts replicas in other folders
    handles = {model.name: _model_deployment(model, model.device or device) for model in config.models}
    indexes = {
        index.name: _deployment(IndexReplica, index, index.model or config.models[0].name, num_replicas=index.replicas)
        for index in config.indexes
    }
    decorated = serve.deployment(
        name="ingress",
        num_replicas=config.ingress_replicas,
        # Reserve no core, since a machine of one core would have no room for it.
        ray_actor_options={"num_cpus": 0},
        # More than the guard accepts, so that it refuses with a reason and Serve's proxy does not queue.
        max_ongoing_requests=2 * REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_S,
        # A successor starts before the ingress ends, since requests would wait otherwise. It reserves no cores.
        max_surge_percent=100,
        logging_config=_LOGGING,
    )
    return decorated(serve.ingress()(Ingress)).bind(config.model_dump(mode="json"), handles, indexes)


def build(arguments: dict[str, str]) -> serve.Application:
    """Build the application for ``serve run esmeray.service.deployments:build config=FILE`` and RayService.

    Args:
        arguments: ``config``, the settings file, and optionally ``device``, cpu or cuda.
    """
    return application(load_settings(ServiceSettings, arguments["config"]).serve, arguments.get("device", "cpu"))


def _cancellable(method: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Wrap a replica's method so that cancelling the caller, e.g. at a 504, cancels the call. Serve does not do so."""

    async def call(*arguments: Any) -> Any:
        response = method.remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    return call


def _model_deployment(model: ServedModel, device: str) -> serve.Application:
    # Otherwise each replica takes the default of the model's task, which is in the model's files.
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
        # Serve refuses both together.
        **({"num_replicas": model.replicas} if model.max_replicas is None else {"autoscaling_config": scaling}),
    )


def _deployment(
    kind: type, served: ServedModel | ServedIndex, argument: str, *, num_gpus: float = 0, **number: Any
) -> serve.Application:
    """Return the deployment of a model or an index. Its class takes the settings, ``argument``, and the version."""
    decorated = serve.deployment(
        name=served.name,
        ray_actor_options={"num_cpus": served.cpus, "num_gpus": num_gpus},
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=2.0,  # until then requests go to a lost replica; the default is 10
        # A single replica serves until its successor is loaded; of several replicas, one ends first.
        max_surge_percent=100 if served.replicas == 1 else 0,
        logging_config=_LOGGING,
        **number,
    )
    # Each start and each SIGHUP is a new version, which loads the files as they are then, also for a hub name.
    return decorated(kind).bind(served.model_dump(mode="json"), argument, secrets.token_hex(8))
