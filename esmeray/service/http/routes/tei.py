"""Routes of text-embeddings-inference (1.8), for its clients: /embed, /embed_all, /predict, /tokenize, /info.

They use the first model; ``POST /`` is /predict for a classifier, /embed for other models. Vectors have length 1
unless ``normalize`` is false. A field that would change the result is either honored or refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from esmeray.service.contract import CLASSES, REQUESTS
from esmeray.service.http.answers import are_many, json_answer, off_loop
from esmeray.service.http.bodies import Body, Entry, OneOrMany
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Shared, about_of, documented, problems, reading, resolve_request

router = APIRouter(responses=problems("application/json"))


class InputsBody(Body):
    """Sequences, under the name that this API uses."""

    inputs: OneOrMany = Field(description="One sequence or many.")
    prompt_name: None = Field(default=None, description="Refused: the models have no prompts.")


class TokenizeBody(InputsBody):
    """Body of /tokenize."""

    add_special_tokens: bool = True


class TruncatedBody(InputsBody):
    """Body of /embed_all."""

    truncate: bool | None = Field(default=None, description="Cut sequences to the model's maximum length.")
    truncation_direction: Literal["left", "right", "Left", "Right"] = Field(
        default="right", description="The end that is cut off."
    )

    @property
    def cut(self) -> str:
        return self.truncation_direction.lower() if self.truncate else ""


class EmbedBody(TruncatedBody):
    """Body of /embed."""

    normalize: bool = True
    dimensions: int | None = Field(default=None, description="The model's number of channels; may be left out.")


class PredictBody(TruncatedBody):
    """Body of /predict."""

    # In this API a flat list is a pair of texts.
    inputs: (
        str
        | Annotated[
            list[Annotated[list[Entry], Field(min_length=1, max_length=1)]], Field(min_length=1, fail_fast=True)
        ]
    ) = Field(description="One sequence, or many, each in a list of its own.")  # type: ignore[assignment]
    raw_scores: Literal[False] = False
    parameters: dict[str, Any] = Field(default={}, max_length=0, description="Sent by huggingface_hub; must be empty.")


@router.post("/embed", name="embeddings", openapi_extra=documented(EmbedBody, fasta=False))
async def embed(
    request: Request, service: Shared, body: Annotated[EmbedBody, Depends(reading(EmbedBody, "inputs"))]
) -> Response:
    """Mean over the residues of each sequence."""
    query = resolve_request(
        service, request, None, body.inputs, output="mean", dimensions=body.dimensions, cut=body.cut
    )
    vectors_ND = np.asarray(await service.models.run(query.about.name, "mean", query.texts, request.state.caller))
    if body.normalize:
        # A zero vector stays zero.
        vectors_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
    return await off_loop(are_many(vectors_ND), json_answer, vectors_ND)


@router.post("/embed_all", name="encode", openapi_extra=documented(TruncatedBody, fasta=False))
async def embed_all(
    request: Request, service: Shared, body: Annotated[TruncatedBody, Depends(reading(TruncatedBody, "inputs"))]
) -> Response:
    """One vector per residue."""
    query = resolve_request(service, request, None, body.inputs, output="residues", cut=body.cut)
    rows = await service.models.run(query.about.name, "residues", query.texts, request.state.caller)
    return await off_loop(are_many(rows), json_answer, rows)


@router.post("/predict", name="classify", openapi_extra=documented(PredictBody, fasta=False))
async def predict(
    request: Request, service: Shared, body: Annotated[PredictBody, Depends(reading(PredictBody, "inputs"))]
) -> Response:
    """Classes and their probabilities, the likeliest first; one list per sequence if a list is sent."""
    about = about_of(service, request, None, CLASSES)
    if about.label_kind == "per_residue":
        raise RefusalError(422, f"model {about.name} has classes of residues; use POST /v1/classify")
    texts = body.inputs if isinstance(body.inputs, str) else [text for (text,) in body.inputs]
    query = resolve_request(service, request, None, texts, output=CLASSES, cut=body.cut)
    shares = await service.models.run(about.name, CLASSES, query.texts, request.state.caller)

    def likeliest_first(values: np.ndarray) -> list[dict[str, Any]]:
        classes = np.argsort(-values, kind="stable")
        return [{"score": float(values[index]), "label": about.labels[index]} for index in classes]

    # A generator, so that the lists are built in the thread.
    answer = (likeliest_first(values) for values in shares)
    return await off_loop(are_many(shares), json_answer, next(answer) if isinstance(body.inputs, str) else answer)


@router.post("/tokenize", name="tokenize", openapi_extra=documented(TokenizeBody, fasta=False))
async def tokenize(
    request: Request, service: Shared, body: Annotated[TokenizeBody, Depends(reading(TokenizeBody, "inputs"))]
) -> Response:
    """Tokens with ids and positions."""
    query = resolve_request(service, request, None, body.inputs)
    # Positions are known only if each token is a residue.
    if not query.about.vocabulary:
        raise RefusalError(422, f"model {query.about.name}: use POST /v1/tokenize")
    ids_N = await service.models.tokens(query.about.name, query.texts)

    def answer() -> Iterator[list[dict[str, Any]]]:
        for ids in ids_N:
            tokens: list[dict[str, Any]] = []
            for index, token in enumerate(ids):
                special = index in (0, len(ids) - 1)
                span = {} if special else {"start": index - 1, "stop": index}  # position in the text, without <cls>
                tokens.append({"id": token, "text": query.about.vocabulary[token], "special": special, **span})
            yield tokens if body.add_special_tokens else tokens[1:-1]

    return await off_loop(are_many(ids_N), json_answer, answer())


@router.get("/info", name="models")
async def info(request: Request, service: Shared) -> Response:
    """The first model and the limits."""
    about = about_of(service, request, None, None)
    limits = service.limits
    classes = {name: number for number, name in enumerate(about.labels)}
    return json_answer(
        {
            "model_id": about.name,
            "model_sha": about.fingerprint,
            "model_dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(about.precision, "float32"),
            "model_type": {"classifier": {"id2label": dict(enumerate(about.labels)), "label2id": classes}}
            if about.labels
            else {"embedding": {"pooling": "mean"}},
            "max_concurrent_requests": REQUESTS,
            "max_input_length": min(limits.sequence_residues, about.longest or limits.sequence_residues),
            "max_batch_tokens": about.tokens,
            "max_client_batch_size": limits.sequences,
            "auto_truncate": False,
            "tokenization_workers": 1,
            "version": "1.8.0",  # version of the API, which clients check
        }
    )
