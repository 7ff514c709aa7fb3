"""OpenAI-compatible routes: ``POST /v1/embeddings``, ``GET /v1/models`` and ``GET /v1/models/NAME``."""

import base64
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from esmeray.service.contract import About, AboutIndex
from esmeray.service.http.answers import are_many, arrays_answer, json_answer, off_loop
from esmeray.service.http.bodies import Body, OneOrMany
from esmeray.service.http.routes.common import Accepted, Shared, about_of, documented, reading, resolve_request

router = APIRouter()
SHOWN = ("outputs", "labels", "label_kind", "longest", "random_weights", "device", "precision", "fingerprint")
"""Facts about a model, in addition to the ones that OpenAI's clients read."""
SHOWN_OF_INDEX = ("name", "vectors", "metric", "output", "link")


class EmbeddingsBody(Body):
    """OpenAI's body, with sequences in place of texts."""

    input: OneOrMany = Field(description="One sequence or many.")
    model: str | None = Field(default=None, description="Default: the first of GET /v1/models.")
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="Default: float.")
    dimensions: int | None = Field(default=None, description="The model's number of channels; may be left out.")
    user: Any = Field(default=None, description="Accepted and ignored.")
    pooling: Literal["mean", "max", "cls"] = Field(
        default="mean", description="Pooling over the residues. Not in OpenAI's API."
    )


@router.post("/v1/embeddings", name="embeddings", openapi_extra=documented(EmbeddingsBody))
async def embeddings(
    request: Request,
    service: Shared,
    kind: Accepted,
    body: Annotated[EmbeddingsBody, Depends(reading(EmbeddingsBody, "input"))],
) -> Response:
    """One vector for each sequence."""
    query = resolve_request(service, request, body.model, body.input, output=body.pooling, dimensions=body.dimensions)
    vectors = await service.models.run(query.about.name, body.pooling, query.texts, request.state.caller)
    values: Iterable[Any] = vectors
    if body.encoding_format == "base64":  # little-endian fp32, as OpenAI's clients read it
        values = (base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") for vector in vectors)
    tokens = sum(map(len, query.texts)) + 2 * len(query.texts)  # <cls> and <eos> of each
    content = {
        "object": "list",
        "data": ({"object": "embedding", "index": number, "embedding": value} for number, value in enumerate(values)),
        "model": query.about.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return await off_loop(are_many(vectors), arrays_answer, kind, query.ids, vectors, "embedding", content)


@router.get("/v1/models", name="models")
async def models(request: Request, service: Shared) -> Response:
    """Models that the caller may use, with their outputs and indexes."""
    indexes = service.models.about_index.values()
    data = [_shown(about, indexes) for name, about in service.models.about.items() if request.state.key.allows(name)]
    return json_answer({"object": "list", "data": data})


@router.get("/v1/models/{name:path}", name="models")
async def model(request: Request, service: Shared, name: str) -> Response:
    """One model. Its name may contain slashes, as on the hub."""
    return json_answer(_shown(about_of(service, request, name, None), service.models.about_index.values()))


def _shown(about: About, indexes: Iterable[AboutIndex]) -> dict[str, Any]:
    return {
        "id": about.name,
        "object": "model",
        "created": 0,
        "owned_by": "esmeray",
        **_facts(about, SHOWN),
        "indexes": [_facts(index, SHOWN_OF_INDEX) for index in indexes if index.model == about.name],
    }


def _facts(about: About | AboutIndex, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(about, name) for name in names}
