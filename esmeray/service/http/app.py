"""HTTP application of the ingress, run by Ray Serve or a test: routes, refusals, and the guard around them."""

import asyncio
import logging
from pkgutil import resolve_name

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from esmeray.common.errors import ConfigError
from esmeray.service.http.access import PUBLIC, Access, read_keys
from esmeray.service.http.bodies import check_query
from esmeray.service.http.guard import Guard
from esmeray.service.http.models import Models
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes import design, native, openai, operations, search, tei
from esmeray.service.http.routes.common import Service, WideSearches, problems
from esmeray.service.section import ServeSection

log = logging.getLogger("esmeray.service")

ROUTES = (openai, native, search, design, tei, operations)
"""Modules with routes, in the order of /docs."""
DESCRIPTION = """Embeddings, latents, classes, mutation scores, neighbours and designs of proteins. Bodies are JSON, or
FASTA as text/x-fasta with the other fields in the query; answers are JSON, or Arrow, .npy, Parquet and CSV as `Accept`
asks."""


def build_app(config: ServeSection, models: Models, *, adds_request_id: bool = True) -> Guard:
    """Build the application.

    Args:
        config: settings of the service.
        models: served models and indexes.
        adds_request_id: True if no proxy adds the header X-Request-ID.

    Raises ConfigError if the keys or the start-up hook can't be read.
    """
    access = Access(None if config.access.keys is None else read_keys(config.access.keys))
    app = FastAPI(
        title="Esmeray",
        description=DESCRIPTION,
        # FastAPI's own pages load scripts from other hosts; operations.py serves them from this one.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # they would use the header Host, which the caller chooses
        dependencies=[Depends(_check)],
        responses=problems(),
    )
    app.openapi_version = "3.0.3"  # Swagger UI 4.15, which the page uses, can't render 3.1
    # One per replica of an index, and one more on its way.
    wide_searches = WideSearches(asyncio.Semaphore(1 + sum(index.replicas for index in config.indexes)))
    service = app.state.service = Service(models, access, config.limits, wide_searches)
    for module in ROUTES:
        app.include_router(module.router)
    for kind in (RefusalError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _refuse)
    name = config.startup_hook
    if name is not None:
        try:
            hook = resolve_name(name)
            if not callable(hook):
                raise ValueError("it is not a function")
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"startup_hook: {name}: can't be imported ({error}); name it as MODULE:FUNCTION"
            ) from error
        hook(app)
    # Outermost, around the hook's middleware too: requests refused for size or key cost nothing else.
    return Guard(app, service, adds_request_id)


def scopes() -> list[str]:
    """Return the names of the routes that need a key. These are the values of a key's ``endpoints``."""
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    return sorted({route.name for route in routes if route.path not in PUBLIC})


async def _check(request: Request) -> None:
    """Refuse keys for other endpoints, and unknown query parameters of GET. :func:`read` checks the query of POST."""
    route = request.scope["route"]
    request.state.key.check_endpoint(route.name)  # before the body is read
    if request.method == "GET":
        check_query(request, [field.alias for field in route.dependant.query_params])


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the answer to an error. An unexpected error is logged, and the answer tells nothing about it."""
    match error:
        case RefusalError():
            refusal = error
        case HTTPException(status_code=404):
            refusal = RefusalError(404, "no such address; see /docs")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "").replace("GET", "GET, HEAD")
            allowed += ", POST" if request.url.path == "/" else ""  # which the guard routes
            refusal = RefusalError(405, f"this address takes {allowed}", headers={"Allow": allowed})
        case HTTPException():
            refusal = RefusalError(error.status_code, error.detail)
        case RequestValidationError():  # its own text would repeat the request
            refusal = RefusalError(422, "the query of the address does not match /docs")
        case ClientDisconnect():
            refusal = RefusalError(400, "the connection ended before the end of the body")
        case _:
            log.error("request %s failed", request.state.request_id, exc_info=error)
            refusal = RefusalError(500, "the service failed; its log has the request's id")
    return refusal.response(request.scope, request.state.request_id)
