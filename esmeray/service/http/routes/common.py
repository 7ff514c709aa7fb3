"""Shared code of routes: parameters of a route (service, kind of answer, body), and the steps of a computation.

The steps are: model, scope of the key, checks, rate, computation.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Request
from pydantic import BaseModel

from esmeray.common.errors import DataError
from esmeray.dataset.fasta.alphabet import residues_of
from esmeray.service.contract import LIKELIHOOD, About
from esmeray.service.http.access import Access
from esmeray.service.http.answers import wanted
from esmeray.service.http.bodies import FASTA_TYPES, Record, Schema, checked, read
from esmeray.service.http.models import Models
from esmeray.service.http.refusals import RefusalError
from esmeray.service.section import LimitsSection


@dataclass
class WideSearches:
    """Limit on concurrent searches for many neighbours. It leaves three quarters of the time to other requests.

    Attributes:
        turns: semaphore that each running search holds.
        present: number of running and waiting searches.
    """

    turns: asyncio.Semaphore
    present: int = 0

    @asynccontextmanager
    async def turn(self, ongoing: Callable[[], int]) -> AsyncIterator[None]:
        """Wait for a turn. After the block, if other requests are ``ongoing``, rest three times as long as it took."""
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
    """Model and sequences of a request. Ids default to numbers; texts are in upper case."""

    about: About
    ids: list[str]
    texts: list[str]


async def _service(request: Request) -> Any:
    return request.app.state.service


Shared = Annotated[Service, Depends(_service)]
"""Parameter of a route: the shared state."""
Accepted = Annotated[str, Depends(wanted)]
"""Parameter of a route: the kind of answer. It comes before the body, so that a refused request is not read."""


def reading(schema: type[Schema], sequences_field: str = "sequences") -> Callable[..., Awaitable[Schema]]:
    """Return a dependency that reads a route's body by the schema and within the limits, which FastAPI has not."""

    async def body(request: Request, service: Shared) -> Schema:
        return await read(request, schema, service.limits, sequences_field)

    return body


def resolve_request(
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
    """Check model, scope, sequences and rate of a request. Raises RefusalError."""
    about = about_of(service, request, model, output)
    # Other APIs truncate vectors to fewer channels. A truncated mean is no embedding, so it is refused.
    if output is not None and dimensions not in (None, about.outputs[output]):
        raise RefusalError(422, f"dimensions: the model has {about.outputs[output]}; leave it out", param="dimensions")
    ids, texts = checked(sequences, service.limits, about, masks=masks, crop=crop, cut=cut)
    try:
        unknown = about.unknown.report(texts)
    except DataError as error:
        raise RefusalError(422, str(error)) from None
    if unknown is not None:
        request.scope["state"]["answer_headers"].append((b"x-unknown-residues", unknown.encode()))
    residues = masked_residues(service, texts) if output == LIKELIHOOD else sum(map(residues_of, texts))
    # Last, so that refused requests don't count in the key's rate.
    charge(service, request, about.name, len(texts), residues)
    return Query(about, ids, texts)


def about_of(service: Service, request: Request, model: str | None, output: str | None) -> About:
    """Return the description of a model. Raises RefusalError.

    Reasons: no such model (404), not for this key (403), or no such output (422).
    """
    about = service.models.named(model)
    # Checked here, not in the guard, since the model's name is in the body.
    if not request.state.key.allows(about.name):
        raise RefusalError(403, f"this key is not for model {about.name}; ask for one that is")
    if output is not None and output not in about.outputs:
        raise RefusalError(422, f"model {about.name} has no {output}; it has {', '.join(about.outputs)}")
    return about


def masked_residues(service: Service, texts: Sequence[str]) -> int:
    """Return the number of residues that the model reads to mask each position in turn. Raises RefusalError (413)."""
    # One forward pass per residue: 50,000 residues, which the limits allow, would take days.
    total = sum(len(text) ** 2 for text in texts)
    if total > service.limits.residues * 10:
        raise RefusalError(413, f"masking each position takes {total:,} residues; send shorter or fewer sequences")
    return total


def charge(service: Service, request: Request, model: str, sequences: int, residues: int) -> None:
    service.access.charge(request.state.key, "residues", residues)
    service.models.metrics.sequences.labels(model).inc(sequences)
    service.models.metrics.residues.labels(model).inc(residues)
    request.scope["state"] |= {"model": model, "sequences": sequences, "residues": residues}  # for the guard's log


def documented(schema: type[BaseModel], *, fasta: bool = True) -> dict[str, Any]:
    """Return the request's body for the OpenAPI document, since FastAPI does not see what :func:`reading` reads."""
    described = schema.model_json_schema()
    definitions = described.pop("$defs", {})  # references to them don't resolve inside an OpenAPI document
    text = json.dumps(described)
    for name, definition in definitions.items():
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(definition))
    content: dict[str, Any] = {"application/json": {"schema": json.loads(text)}}
    if fasta:
        content[FASTA_TYPES[0]] = {"schema": {"type": "string"}}
    return {"requestBody": {"required": True, "content": content}}


def problems(media_type: str = "application/problem+json") -> dict[int | str, dict[str, Any]]:
    """Return the refusals for the OpenAPI document."""
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
