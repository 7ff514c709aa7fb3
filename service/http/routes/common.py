"""What every route that computes does: model, scope, checks, rate, computation."""

import json
from typing import Any, NamedTuple

from fastapi import Request
from pydantic import BaseModel

from esmeray.dataset.fasta.alphabet import residues_of
from esmeray.service.contract import About
from esmeray.service.http.access import Access, Key
from esmeray.service.http.bodies import FASTA_TYPES, Record, checked
from esmeray.service.http.models import Models
from esmeray.service.http.refusals import RefusalError
from esmeray.service.section import LimitsSection


class Service(NamedTuple):
    """What routes share."""

    models: Models
    access: Access
    limits: LimitsSection


class Query(NamedTuple):
    """A request's model and sequences: ids (their number where there was none) and texts, upper case; who asks."""

    about: About
    ids: list[str]
    texts: list[str]
    caller: str


def ask(
    service: Service,
    request: Request,
    model: str | None,
    sequences: str | list[str | Record],
    *,
    output: str | None = None,
    masks: bool = False,
    crop: bool = False,
) -> Query:
    """Check model, scope, sequences and rate. Raises RefusalError."""
    about = about_of(service, request, model, output)
    ids, texts = checked(sequences, service.limits, about, masks=masks, crop=crop)
    charge(service, request, about.name, len(texts), sum(map(residues_of, texts)))
    return Query(about, ids, texts, request.state.caller)


def about_of(service: Service, request: Request, model: str | None, output: str | None) -> Any:
    """What is known of a model that the caller may use and that has the output; raises RefusalError (403, 404, 422)."""
    about = service.models.named(model)
    key: Key = request.state.key
    if not key.allows(about.name):
        raise RefusalError(403, f"this key is not for model {about.name}; ask for one that is")
    if output is not None and output not in about.outputs:
        raise RefusalError(422, f"model {about.name} has no {output}; it has {', '.join(about.outputs)}")
    return about


def charge(service: Service, request: Request, model: str, sequences: int, residues: int) -> None:
    service.access.charge(request.state.key, "residues", residues)
    service.models.metrics.sequences.labels(model).inc(sequences)
    service.models.metrics.residues.labels(model).inc(residues)
    request.scope["state"] |= {"model": model, "sequences": sequences, "residues": residues}


def documented(schema: type[BaseModel], *, fasta: bool = True) -> dict[str, Any]:
    """The request's body for the OpenAPI document: bodies are read within limits, which FastAPI's own reading lacks."""
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
