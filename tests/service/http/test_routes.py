"""A new route is a module and its name: docs/design.md lists the files, /docs and docs/service.md the routes."""

import importlib
import sys
from pathlib import Path

import pytest
import yaml
from starlette.routing import Route

from esmeray.inference.models.kinds import output_names
from esmeray.service.http import app
from esmeray.service.http.access import new_key
from tests.conftest import REPOSITORY
from tests.service.serving import Serving, problem

LENGTHS = '''
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from esmeray.service.http.answers import json_answer
from esmeray.service.http.bodies import SequencesBody
from esmeray.service.http.routes.common import Shared, ask, documented, reading

router = APIRouter()


@router.post("/v1/lengths", name="lengths", openapi_extra=documented(SequencesBody))
async def lengths(
    request: Request, service: Shared, body: Annotated[SequencesBody, Depends(reading(SequencesBody))]
) -> Response:
    """Residues of each sequence."""
    query = ask(service, request, body.model, body.sequences, output="mean")
    return json_answer(list(map(len, query.texts)))
'''


def test_a_new_route_is_its_module_and_its_name(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lengths.py").write_text(LENGTHS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(app, "ROUTES", (*app.ROUTES, importlib.import_module("lengths")))
    monkeypatch.delitem(sys.modules, "lengths")
    assert "lengths" in app.scopes()
    keys = {name: new_key(name) for name in ("lengths", "embeddings")}
    scoped = [key.model_copy(update={"endpoints": [name]}).model_dump() for name, (_, key) in keys.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(scoped))
    with serving.client(access={"keys": str(tmp_path / "keys.yaml")}) as client:
        headers = {name: {"Authorization": f"Bearer {text}"} for name, (text, _) in keys.items()}
        fasta = {"headers": {**headers["lengths"], "Content-Type": "text/x-fasta"}, "content": ">a\nMKT\n>b\nMK\n"}
        assert client.post("/v1/lengths", **fasta).json() == [3, 2]
        answer = client.post("/v1/lengths", json={"sequences": ["MKT"]}, headers=headers["embeddings"])
        assert "not for lengths" in problem(answer, 403)
        assert "/v1/lengths" in client.get("/openapi.json").json()["paths"]


def test_the_pages_list_the_files_of_a_route_every_route_and_every_output():
    design = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    files = design.partition("## A new route")[2].partition("\n## ")[0].split("`")[1::2]
    named = {name for name in files if name.endswith((".py", ".md")) and (REPOSITORY / name).is_file()}
    assert named >= {"service/http/app.py", "docs/service.md"}
    endpoints = (REPOSITORY / "docs" / "service.md").read_text(encoding="utf-8").partition("## Batches")[0]
    every = [route for module in app.ROUTES for route in module.router.routes if isinstance(route, Route)]
    routes = [route for route in every if route.include_in_schema]
    assert [route.path for route in routes if route.path.partition("{")[0] not in endpoints] == []
    assert {route.name for route in routes} - {"health", "ready"} == {*app.scopes()}
    assert [name for name in output_names() if name not in ("classes", "contacts") and name not in endpoints] == []
