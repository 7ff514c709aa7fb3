"""docs/design.md lists the files of a new route, docs/service.md all routes."""

from starlette.routing import Route

from esmeray.inference.models.kinds import output_names
from esmeray.service.http import app
from tests.conftest import REPOSITORY


def test_the_pages_list_the_files_of_a_route_every_route_and_every_output():
    design = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    files = design.partition("## A new route")[2].partition("\n## ")[0].split("`")[1::2]
    named = {name for name in files if name.endswith((".py", ".md")) and (REPOSITORY / name).is_file()}
    assert named >= {"esmeray/service/http/app.py", "docs/service.md"}
    endpoints = (REPOSITORY / "docs" / "service.md").read_text(encoding="utf-8").partition("## Batches")[0]
    every = [route for module in app.ROUTES for route in module.router.routes if isinstance(route, Route)]
    routes = [route for route in every if route.include_in_schema]
    assert [route.path for route in routes if route.path.partition("{")[0] not in endpoints] == []
    assert {route.name for route in routes} - {"health", "ready"} == {*app.scopes()}
    assert [name for name in output_names() if name not in ("classes", "contacts") and name not in endpoints] == []
