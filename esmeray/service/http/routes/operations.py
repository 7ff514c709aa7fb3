"""Routes for operators of the service, and the page: /health, /ready, /metrics, /."""

from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, PlainTextResponse, Response
from swagger_ui_bundle import swagger_ui_path

from esmeray.service.http.answers import json_answer
from esmeray.service.http.models import RETRY_S
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Shared

router = APIRouter()
PAGE = Path(__file__).resolve().parents[1] / "page"
# Single files, not a folder, so that a path in a request can't reach other files.
FILES = {
    "/": PAGE / "page.html",
    "/page.js": PAGE / "page.js",
    "/page.css": PAGE / "page.css",
    "/swagger-ui-bundle.js": Path(swagger_ui_path) / "swagger-ui-bundle.js",
    "/swagger-ui.css": Path(swagger_ui_path) / "swagger-ui.css",
}
# The browser only runs scripts from this address, so a script in an id or a sequence is not run.
_POLICY = {"Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"}


@router.get("/health", name="health")
async def health() -> Response:
    """The process answers."""
    return json_answer({"status": "ok"})


@router.get("/ready", name="ready")
async def ready(service: Shared) -> Response:
    """All models are loaded and warmed up, and all indexes can be searched."""
    if not service.models.about:
        raise RefusalError(503, "models are being loaded", 1)
    problem = await service.models.unready()
    if problem:
        raise RefusalError(503, problem, RETRY_S)
    return json_answer({"status": "ready", "models": list(service.models.about)})


@router.get("/metrics", name="metrics", response_class=PlainTextResponse)
async def metrics(service: Shared) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(service.models.metrics.page(), media_type="text/plain; version=0.0.4")


def _file(path: Path) -> Response:
    return FileResponse(path, headers=_POLICY)


for address, path in FILES.items():
    router.add_api_route(address, partial(_file, path), name="page", include_in_schema=False)


@router.get("/openapi.json", name="docs", include_in_schema=False)
async def schema(request: Request) -> Response:
    """The endpoints as an OpenAPI document."""
    return json_answer(request.app.openapi())


@router.get("/docs", name="docs", include_in_schema=False)
async def docs() -> Response:
    """The endpoints in Swagger UI, which this process serves: no network is needed."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Esmeray: endpoints",
        swagger_js_url="swagger-ui-bundle.js",
        swagger_css_url="swagger-ui.css",
        swagger_favicon_url="data:,",
    )
