"""Shared code of routes: the service, the kind of answer and the body as parameters of a route; the steps of one that
computes: model, scope, checks, rate, computation.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Request
from pydantic import BaseModel

from esmeray.common.errors import DataError
from esmeray.dataset.fasta.alphabet import residues_of
from esmeray.service.contract import About
from esmeray.service.http.access import Access
from esmeray.service.http.answers import wanted
from esmeray.service.http.bodies import FASTA_TYPES, Record, Schema, checked, read
from esmeray.service.http.models import Models
from esmeray.service.http.refusals import RefusalError
from esmeray.service.section import LimitsSection


@dataclass
class WideSearches:
    """Turns of searches for many neighbours, which leave three quarters of the time to other requests.

    ``turns`` is held by each that is searched; ``present`` counts also those that wait.
    """

    turns: asyncio.Semaphore
    present: int = 0

    @asynccontextmanager
    async def turn(self, ongoing: Callable[[], int]) -> AsyncIterator[None]:
        """Wait for a turn. After the block, rest if requests of other kinds are ``ongoing``, three times as long."""
        self.present += 1
        try:
            async with self.turns:
                start = time.perf_counter()
                yield
                if ongoing() > self.present:
                    await asyncio.sleep(3 * (time.perf_counter() - start))
        finally:
            self.present -= 1


class Service(NamedTuple):
    """Shared state of the routes."""

    models: Models
    access: Access
    limits: LimitsSection
    wide_searches: WideSearches


class Query(NamedTuple):
    """A request's model and sequences: ids (their number where there was none) and texts, upper case; who asks."""

    about: About
    ids: list[str]
    texts: list[str]
    caller: str


async def _service(request: Request) -> Any:
    return request.app.state.service


Shared = Annotated[Service, Depends(_service)]
"""Parameter of a route: what routes share."""
Accepted = Annotated[str, Depends(wanted)]
"""Parameter of a route: the kind of answer. Before the body, so that no request is read in vain."""


def reading(schema: type[Schema], sequences_field: str = "sequences") -> Callable[..., Awaitable[Schema]]:
    """Dependency of a route: its body, by the schema and within the limits, which FastAPI's own reading lacks."""

    async def body(request: Request, service: Shared) -> Schema:
        return await read(request, schema, service.limits, sequences_field)

    return body


def ask(
    service: Service,
    request: Request,
    model: str | None,
    sequences: str | list[str | Record],
    *,
    output: str | None = None,
    dimensions: int | None = None,
    masks: bool = False,
    crop: bool = False,
    cut: str = "",
) -> Query:
    """Check model, scope, sequences and rate. Raises RefusalError."""
    about = about_of(service, request, model, output)
    # Other APIs cut vectors to fewer channels; a cut mean of ours would be no embedding, so it is refused.
    if output is not None and dimensions not in (None, about.outputs[output]):
        raise RefusalError(422, f"dimensions: the model has {about.outputs[output]}; leave it out", param="dimensions")
    ids, texts = checked(sequences, service.limits, about, masks=masks, crop=crop, cut=cut)
    try:
        unknown = about.unknown.report(texts)
    except DataError as error:
        raise RefusalError(422, str(error)) from None
    if unknown is not None:
        request.scope["state"]["answer_headers"].append((b"x-unknown-residues", unknown.encode()))
    # Last: what is refused costs nothing of the key's rate.
    charge(service, request, about.name, len(texts), sum(map(residues_of, texts)))
    return Query(about, ids, texts, request.state.caller)


def about_of(service: Service, request: Request, model: str | None, output: str | None) -> About:
    """Description of a model that the caller may use and that has the output; raises RefusalError (403, 404, 422)."""
    about = service.models.named(model)
    # Here and not in the guard, since the model's name is in the body.
    if not request.state.key.allows(about.name):
        raise RefusalError(403, f"this key is not for model {about.name}; ask for one that is")
    if output is not None and output not in about.outputs:
        raise RefusalError(422, f"model {about.name} has no {output}; it has {', '.join(about.outputs)}")
    return about


def charge(service: Service, request: Request, model: str, sequences: int, residues: int) -> None:
    service.access.charge(request.state.key, "residues", residues)
    service.models.metrics.sequences.labels(model).inc(sequences)
    service.models.metrics.residues.labels(model).inc(residues)
    request.scope["state"] |= {"model": model, "sequences": sequences, "residues": residues}  # for the guard's log


def documented(schema: type[BaseModel], *, fasta: bool = True) -> dict[str, Any]:
    """The request's body for the OpenAPI document, which does not see what :func:`reading` reads."""
    described = schema.model_json_schema()
    definitions = described.pop("$defs", {})  # to which nothing inside an OpenAPI document can refer
    text = json.dumps(described)
    for name, definition in definitions.items():
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(definition))
    content: dict[str, Any] = {"application/json": {"schema": json.loads(text)}}
    if fasta:
        content[FASTA_TYPES[0]] = {"schema": {"type": "string"}}
    return {"requestBody": {"required": True, "content": content}}


def problems(media_type: str = "application/problem+json") -> dict[int | str, dict[str, Any]]:
    """Refusals for the OpenAPI document."""
    problem = {"content": {media_type: {"schema": {"type": "object"}}}}
    texts = {
        400: "No JSON or FASTA",
        401: "No key",
        403: "Another key's scope",
        404: "No such model",
        406: "No such answer",
        408: "Body too slow",
        413: "Too much",
        415: "Kind of body",
        422: "Body not as the schema says",
        429: "Overloaded; Retry-After",
        503: "Replica lost; Retry-After",
        504: "Too slow",
    }
    return {status: {"description": text, **problem} for status, text in texts.items()}
