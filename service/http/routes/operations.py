"""Routes for whoever runs the service, and the page: /health, /ready, /metrics, /."""

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, PlainTextResponse, Response
from swagger_ui_bundle import swagger_ui_path

from esmeray.service.http.answers import json_answer
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Service

PAGE = Path(__file__).resolve().parents[1] / "page"
FILES = {
    "/": PAGE / "page.html",
    "/page.js": PAGE / "page.js",
    "/page.css": PAGE / "page.css",
    "/swagger-ui-bundle.js": Path(swagger_ui_path) / "swagger-ui-bundle.js",
    "/swagger-ui.css": Path(swagger_ui_path) / "swagger-ui.css",
}
_POLICY = {"Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"}


def add(app: FastAPI, service: Service, **documents: Any) -> None:
    @app.get("/health", name="health")
    async def health() -> Response:
        """The process answers."""
        return json_answer({"status": "ok"})

    @app.get("/ready", name="ready")
    async def ready() -> Response:
        """Every model is loaded and warmed up."""
        if not service.models.about:
            raise RefusalError(503, "models are being loaded", 1)
        return json_answer({"status": "ready", "models": list(service.models.about)})

    @app.get("/metrics", name="metrics", response_class=PlainTextResponse, **documents)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.models.metrics.page(), media_type="text/plain; version=0.0.4")

    def file(path: Path) -> Response:
        return FileResponse(path, headers=_POLICY)

    for name, path in FILES.items():
        app.add_api_route(name, partial(file, path), name="page", include_in_schema=False)

    @app.get("/openapi.json", name="docs", include_in_schema=False)
    async def schema() -> Response:
        """The endpoints for programs."""
        return json_answer(app.openapi())

    @app.get("/docs", name="docs", include_in_schema=False)
    async def docs() -> Response:
        """Endpoints, by Swagger UI from this process: no network is needed."""
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title="Esmeray: endpoints",
            swagger_js_url="swagger-ui-bundle.js",
            swagger_css_url="swagger-ui.css",
            swagger_favicon_url="data:,",
        )
