"""Routes of text-embeddings-inference (1.8), for its clients: /embed, /embed_all, /tokenize, /info.

They use the first model. Vectors are of length 1 unless ``normalize`` is false, as there.
"""

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from esmeray.service.http.answers import json_answer
from esmeray.service.http.bodies import OneOrMany, Record
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Service, Shared, about_of, ask, documented, problems, reading

router = APIRouter(responses=problems("application/json"))


class InputsBody(BaseModel):
    """Sequences as this API names them."""

    inputs: OneOrMany = Field(description="One sequence or many.")


class TokenizeBody(InputsBody):
    """Body of /tokenize."""

    add_special_tokens: bool = True


class EmbedBody(InputsBody):
    """Body of /embed and /embed_all."""

    normalize: bool = True
    truncate: bool | None = Field(None, description="Cut sequences at the model's longest.")


def _cut(service: Service, body: EmbedBody) -> list[str | Record]:
    longest = service.models.named(None).longest or service.limits.sequence_residues
    records = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    texts = [record.sequence if isinstance(record, Record) else record for record in records]
    return [text[:longest] for text in texts] if body.truncate else list(texts)


@router.post("/embed", name="embeddings", openapi_extra=documented(EmbedBody, fasta=False))
async def embed(
    request: Request, service: Shared, body: Annotated[EmbedBody, Depends(reading(EmbedBody, "inputs"))]
) -> Response:
    """Means over residues."""
    query = ask(service, request, None, _cut(service, body), output="mean")
    vectors_ND = np.asarray(await service.models.run(query.about.name, "mean", query.texts, query.caller))
    if body.normalize:
        # A vector of zeros stays one.
        vectors_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
    return json_answer(vectors_ND)


@router.post("/embed_all", name="encode", openapi_extra=documented(EmbedBody, fasta=False))
async def embed_all(
    request: Request, service: Shared, body: Annotated[EmbedBody, Depends(reading(EmbedBody, "inputs"))]
) -> Response:
    """A vector for each residue."""
    query = ask(service, request, None, _cut(service, body), output="residues")
    return json_answer(await service.models.run(query.about.name, "residues", query.texts, query.caller))


@router.post("/tokenize", name="tokenize", openapi_extra=documented(TokenizeBody, fasta=False))
async def tokenize(
    request: Request, service: Shared, body: Annotated[TokenizeBody, Depends(reading(TokenizeBody, "inputs"))]
) -> Response:
    """Tokens with ids and positions."""
    query = ask(service, request, None, body.inputs)
    # Positions are known where a token is a residue.
    if not query.about.vocabulary:
        raise RefusalError(422, f"model {query.about.name}: use POST /v1/tokenize")
    answer = []
    for ids in await service.models.tokens(query.about.name, query.texts):
        tokens: list[dict[str, Any]] = []
        for index, token in enumerate(ids):
            special = index in (0, len(ids) - 1)
            span = {} if special else {"start": index - 1, "stop": index}  # in the text, which <cls> is not part of
            tokens.append({"id": token, "text": query.about.vocabulary[token], "special": special, **span})
        answer.append(tokens if body.add_special_tokens else tokens[1:-1])
    return json_answer(answer)


@router.get("/info", name="models")
async def info(request: Request, service: Shared) -> Response:
    """The first model and the limits."""
    about = about_of(service, request, None, None)
    limits = service.limits
    return json_answer(
        {
            "model_id": about.name,
            "model_sha": about.fingerprint,
            "model_dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(about.precision, "float32"),
            "model_type": {"embedding": {"pooling": "mean"}},
            "max_concurrent_requests": limits.requests,
            "max_input_length": about.longest or limits.sequence_residues,
            "max_batch_tokens": about.tokens,
            "max_client_batch_size": limits.sequences,
            "auto_truncate": False,
            "tokenization_workers": 1,
            "version": "1.8.0",  # of the API, which clients check
        }
    )
