"""Routes of text-embeddings-inference (1.8), for its clients: /embed, /embed_all, /tokenize, /info.

They use the first model. Vectors are of length 1 unless ``normalize`` is false, as there.
"""

from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from esmeray.service.http.answers import json_answer
from esmeray.service.http.bodies import OneOrMany, Record, read
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Service, about_of, ask, documented, problems


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


def add(app: FastAPI, service: Service, **documents: Any) -> None:
    documents["responses"] = problems("application/json")

    def cut(body: EmbedBody) -> list[str | Record]:
        longest = service.models.named(None).longest or service.limits.sequence_residues
        records = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        texts = [record.sequence if isinstance(record, Record) else record for record in records]
        return [text[:longest] for text in texts] if body.truncate else list(texts)

    @app.post("/embed", name="embeddings", openapi_extra=documented(EmbedBody, fasta=False), **documents)
    async def embed(request: Request) -> Response:
        """Means over residues."""
        body = await read(request, EmbedBody, service.limits, "inputs")
        query = ask(service, request, None, cut(body), output="mean")
        vectors_ND = np.asarray(await service.models.run(query.about.name, "mean", query.texts, query.caller))
        if body.normalize:
            vectors_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
        return json_answer(vectors_ND)

    @app.post("/embed_all", name="encode", openapi_extra=documented(EmbedBody, fasta=False), **documents)
    async def embed_all(request: Request) -> Response:
        """A vector for each residue."""
        body = await read(request, EmbedBody, service.limits, "inputs")
        query = ask(service, request, None, cut(body), output="residues")
        return json_answer(await service.models.run(query.about.name, "residues", query.texts, query.caller))

    @app.post("/tokenize", name="tokenize", openapi_extra=documented(TokenizeBody, fasta=False), **documents)
    async def tokenize(request: Request) -> Response:
        """Tokens with ids and places."""
        body = await read(request, TokenizeBody, service.limits, "inputs")
        query = ask(service, request, None, body.inputs)
        if not query.about.vocabulary:
            raise RefusalError(422, f"model {query.about.name}: use POST /v1/tokenize")
        answer = []
        for ids in await service.models.tokens(query.about.name, query.texts):
            last = len(ids) - 1
            tokens: list[dict[str, Any]] = []
            for place, token in enumerate(ids):
                special = place in (0, last)
                span = {} if special else {"start": place - 1, "stop": place}
                tokens.append({"id": token, "text": query.about.vocabulary[token], "special": special, **span})
            answer.append(tokens if body.add_special_tokens else tokens[1:-1])
        return json_answer(answer)

    @app.get("/info", name="models", **documents)
    async def info(request: Request) -> Response:
        """The first model and the limits."""
        about, limits = about_of(service, request, None, None), service.limits
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
                "version": "1.8.0",
            }
        )
