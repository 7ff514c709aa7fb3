"""The project's own endpoints: encode, decode, classify, masked, tokenize.

Shape legend: N sequences, L residues of one, D channels, K classes or tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from fastapi import FastAPI, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dataset.fasta.alphabet import AMINO_ACIDS
from service.contract import About
from service.http.answers import arrays_answer, json_answer, table_answer, wanted
from service.http.bodies import SequencesBody, read
from service.http.mutations import masked_texts, mutations_of, scores
from service.http.refusals import RefusalError
from service.http.routes.common import Asked, Service, about_of, ask, charge, documented, rows

OutputName = Literal["mean", "max", "cls", "residues", "logits", "latents", "mean_latents"]


class EncodeBody(SequencesBody):
    """Sequences, and what is wanted of them."""

    output: OutputName = Field("mean", description="One vector a protein, or a row a residue.")


class DecodeBody(BaseModel):
    """Latents of an autoencoder."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | None = None
    latents: list[Any] = Field(min_length=1, description="(residues, channels) of numbers for each protein.")


class MaskedBody(SequencesBody):
    """Sequences, maybe with <mask>, and mutations to score."""

    mutations: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Of the only sequence, as A12G: from, position from 1, to."
    )
    method: Literal["wild_type", "masked"] = Field(
        "wild_type", description="Probabilities of the sequence as it is, or with each position masked in turn."
    )


def add(app: FastAPI, service: Service, **documents: Any) -> None:
    @app.post("/v1/encode", name="encode", openapi_extra=documented(EncodeBody), **documents)
    async def encode(request: Request) -> Response:
        """Embeddings of any output of the model."""
        kind, body = wanted(request), await read(request, EncodeBody)
        asked = ask(service, request, body.model, body.given, output=body.output)
        found = await service.models.run(asked.about.name, body.output, asked.texts)

        def as_json() -> Any:
            data = [{"id": each, "values": values} for each, values in zip(asked.ids, found, strict=True)]
            return {"model": asked.about.name, "output": body.output, "data": data}

        return arrays_answer(kind, asked.ids, found, "embedding", as_json)

    @app.post("/v1/decode", name="decode", openapi_extra=documented(DecodeBody, fasta=False), **documents)
    async def decode(request: Request) -> Response:
        """Sequences and probabilities of the residues from an autoencoder's latents."""
        kind, body = wanted(request), await read(request, DecodeBody)
        about = about_of(service, request, body.model, "decoded")
        latents = [_latents(each, about.outputs["latents"], place) for place, each in enumerate(body.latents)]
        residues = sum(map(len, latents))
        if residues > service.limits.residues:
            raise RefusalError(413, f"latents of {residues:,} residues, more than {service.limits.residues:,}")
        charge(service, request, about.name, len(latents), residues)
        columns = [about.vocabulary.index(letter) for letter in AMINO_ACIDS]
        found = [_softmax(each[:, columns]) for each in await rows(service, about.name, "decoded", latents)]
        texts = ["".join(AMINO_ACIDS[best] for best in each.argmax(1)) for each in found]

        def as_json() -> Any:
            data = [{"sequence": text, "probabilities": each} for text, each in zip(texts, found, strict=True)]
            return {"model": about.name, "letters": AMINO_ACIDS, "data": data}

        return arrays_answer(kind, list(map(str, range(len(texts)))), found, "probabilities", as_json, sequence=texts)

    @app.post("/v1/classify", name="classify", openapi_extra=documented(SequencesBody), **documents)
    async def classify(request: Request) -> Response:
        """Probabilities of a classifier's classes; numbers of a regression."""
        kind, body = wanted(request), await read(request, SequencesBody)
        asked = ask(service, request, body.model, body.given, output="classes", crop=True)
        about = asked.about
        found = await service.models.run(about.name, "classes", asked.texts)

        def as_json() -> Any:
            data = [
                {"id": each, "probabilities": values, "cropped": cropped, **_likeliest(about, values)}
                for each, values, cropped in zip(asked.ids, found, _cropped(about, asked.texts), strict=True)
            ]
            return {"model": about.name, "kind": about.label_kind, "labels": about.labels, "data": data}

        return arrays_answer(kind, asked.ids, found, "probabilities", as_json, cropped=_cropped(about, asked.texts))

    _add_by_tokens(app, service, **documents)


def _add_by_tokens(app: FastAPI, service: Service, **documents: Any) -> None:
    @app.post("/v1/masked", name="masked", openapi_extra=documented(MaskedBody), **documents)
    async def masked(request: Request) -> Response:
        """Probabilities of the 20 amino acids at each position, and scores of point mutations.

        Tables and .npy hold the scores where there are mutations, else the probabilities.
        """
        kind, body = wanted(request), await read(request, MaskedBody)
        asked = ask(service, request, body.model, body.given, output="masked", masks=True)
        mutations = mutations_of(body.mutations, asked.texts)
        found = await _masked_probabilities(service, request, asked, body.method)
        scored = None if mutations is None else scores(mutations, found[0])

        def as_json() -> Any:
            data = [{"id": each, "probabilities": values} for each, values in zip(asked.ids, found, strict=True)]
            answer = {"model": asked.about.name, "letters": AMINO_ACIDS, "method": body.method, "data": data}
            if scored is not None:
                pairs = zip(body.mutations or (), scored, strict=True)
                answer["mutations"] = [{"mutation": mutation, "score": score} for mutation, score in pairs]
            return answer

        if kind and scored is not None:
            return table_answer(kind, pa.table({"mutation": body.mutations, "score": scored}))
        return arrays_answer(kind, asked.ids, found, "probabilities", as_json)

    @app.post("/v1/tokenize", name="tokenize", openapi_extra=documented(SequencesBody), **documents)
    async def tokenize(request: Request) -> Response:
        """Ids of tokens, special ones included."""
        body = await read(request, SequencesBody)
        asked = ask(service, request, body.model, body.given)
        ids = await service.models.tokens(asked.about.name, asked.texts)
        data = [{"id": each, "tokens": tokens} for each, tokens in zip(asked.ids, ids, strict=True)]
        return json_answer({"model": asked.about.name, "data": data})


async def _masked_probabilities(
    service: Service, request: Request, asked: Asked, method: str
) -> list[NDArray[np.float32]]:
    """(L, 20) of each sequence, as it is or with each position masked in turn."""
    model = asked.about.name
    if method == "wild_type":
        logits = await rows(service, model, "logits", asked.texts)
    else:
        total = sum(len(text) ** 2 for text in asked.texts)
        if total > service.limits.residues * 10:
            raise RefusalError(413, f"masking each position takes {total:,} residues; send shorter or fewer sequences")
        service.access.charge(request.state.key, "residues", total)
        texts = [masked_texts(text) for text in asked.texts]
        flat = await rows(service, model, "masked", [text for each in texts for text in each])
        ends = np.cumsum([len(each) for each in texts])[:-1]
        logits = [np.concatenate(each) for each in np.split(np.array(flat, dtype=np.float32), ends)]
    columns = [asked.about.vocabulary.index(letter) for letter in AMINO_ACIDS]
    return [_softmax(each[:, columns]) for each in logits]


def _latents(values: Any, channels: int, place: int) -> NDArray[np.float32]:
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, np.float32)
    if array.ndim != 2 or array.shape[1] != channels or not len(array) or not np.isfinite(array).all():
        raise RefusalError(422, f"latents.{place}: must be (residues, {channels}) of finite numbers")
    return array


def _softmax(logits_LK: NDArray[np.float32]) -> NDArray[np.float32]:
    shares_LK = np.exp(logits_LK - logits_LK.max(axis=1, keepdims=True))
    return shares_LK / shares_LK.sum(axis=1, keepdims=True)


def _cropped(about: About, texts: list[str]) -> list[int]:
    """Residues of each sequence that the classifier leaves out."""
    if about.longest is None or not about.one_token_per_residue:
        return [0] * len(texts)
    return [max(0, len(text) - about.longest) for text in texts]


def _likeliest(about: About, values: NDArray[np.float32]) -> dict[str, Any]:
    if about.label_kind == "per_residue":
        return {"label": "".join(about.labels[best] for best in values.argmax(1))}
    if about.label_kind == "multilabel":
        return {"label": [name for name, value in zip(about.labels, values, strict=True) if value > 0.5]}
    return {} if about.label_kind == "regression" else {"label": about.labels[int(values.argmax())]}
