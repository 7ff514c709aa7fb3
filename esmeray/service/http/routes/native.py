"""Esmeray's own endpoints: encode, decode, classify, masked, tokenize.

Shape legend: N sequences, L residues per sequence, D channels, K classes or tokens.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from scipy.special import softmax

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, MASK_TEXT
from esmeray.inference.calibration import thresholds_of
from esmeray.inference.models.kinds import output_names
from esmeray.inference.mutations.variants import Mutant, Protein, marginal_scores
from esmeray.service.contract import CLASSES, DECODED, EACH_MASKED, MASKED, About
from esmeray.service.http.answers import Arrays, are_many, arrays_answer, json_answer, off_loop, table_answer
from esmeray.service.http.bodies import Body, SequencesBody, check_number
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import (
    Accepted,
    Query,
    Service,
    Shared,
    about_of,
    charge,
    documented,
    masked_residues,
    reading,
    resolve_request,
)
from esmeray.train_config.section import Coverage

router = APIRouter()
MUTATIONS_AT_ONCE = 200
"""Maximum number of mutations that are parsed and scored in the event loop, at 20 µs each; a thread does more."""
# Names only, without importing torch. Classes have their own endpoint, so that keys can be limited to it.
_ENCODED = "|".join(name for name in output_names() if name != CLASSES)


class EncodeBody(SequencesBody):
    """Sequences and the requested output."""

    output: str = Field(
        default="mean", pattern=f"^({_ENCODED})$", description="One vector per protein, or one row per residue."
    )


class ClassifyBody(SequencesBody):
    """Sequences, and the coverage of their conformal sets."""

    coverage: Coverage | None = Field(
        default=None,
        description="Share of the true labels that sets, or intervals of numbers, contain on average, e.g. 0.9.",
    )


class DecodeBody(Body):
    """Latents of an autoencoder."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | None = None
    latents: list[Any] = Field(min_length=1, description="(residues, channels) of numbers for each protein.")


class MaskedBody(SequencesBody):
    """Sequences, which may contain <mask>, and mutations to score."""

    mutations: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        default=None, description="Mutants of the only sequence, e.g. A12G, A12G:C13D or p.Ala12Gly; positions from 1."
    )
    method: Literal["wild_type", "masked"] = Field(
        default="wild_type", description="Probabilities of the sequence as it is, or with each position masked in turn."
    )


@router.post("/v1/encode", name="encode", openapi_extra=documented(EncodeBody))
async def encode(
    request: Request, service: Shared, kind: Accepted, body: Annotated[EncodeBody, Depends(reading(EncodeBody))]
) -> Response:
    """Embeddings of any output of the model."""
    query = resolve_request(service, request, body.model, body.sequences, output=body.output)
    arrays = await service.models.run(query.about.name, body.output, query.texts, request.state.caller)
    content = {
        "model": query.about.name,
        "output": body.output,
        "data": [{"id": name, "values": values} for name, values in zip(query.ids, arrays, strict=True)],
    }
    return await off_loop(are_many(arrays), arrays_answer, kind, query.ids, arrays, "embedding", content)


@router.post("/v1/decode", name="decode", openapi_extra=documented(DecodeBody, fasta=False))
async def decode(
    request: Request, service: Shared, kind: Accepted, body: Annotated[DecodeBody, Depends(reading(DecodeBody))]
) -> Response:
    """Sequences and probabilities of the residues from an autoencoder's latents."""
    about = about_of(service, request, body.model, DECODED)
    channels = about.outputs["latents"]
    latents = [_latents(values, channels, number) for number, values in enumerate(body.latents)]
    residues = sum(map(len, latents))
    check_number(residues, "residues", service.limits)  # here, since the lists had to be built first
    charge(service, request, about.name, len(latents), residues)
    shares = await _amino_acid_shares(
        about, await service.models.run(about.name, DECODED, latents, request.state.caller)
    )
    texts = await off_loop(
        are_many(shares), lambda: [_likeliest_letters(AMINO_ACIDS, shares_LK) for shares_LK in shares]
    )
    content = {
        "model": about.name,
        "letters": AMINO_ACIDS,
        "data": [{"sequence": text, "probabilities": values} for text, values in zip(texts, shares, strict=True)],
    }
    return await off_loop(
        are_many(shares),
        lambda: arrays_answer(
            kind,
            [*map(str, range(len(texts)))],  # latents have no ids
            shares,
            "probabilities",
            content,
            sequence=texts,
        ),
    )


@router.post("/v1/classify", name="classify", openapi_extra=documented(ClassifyBody))
async def classify(
    request: Request, service: Shared, kind: Accepted, body: Annotated[ClassifyBody, Depends(reading(ClassifyBody))]
) -> Response:
    """Probabilities of a classifier's classes, or predicted numbers of a regression.

    With a coverage, answers have the conformal set of each sequence (of each residue, for classes of residues), or the
    ends of the intervals of numbers.

    Tables have a column per class, with its name; for classes of residues they have one column of lists.
    """
    about = about_of(service, request, body.model, CLASSES)
    thresholds = _thresholds(about, body.coverage, kind)  # refused before the request counts in the key's rate
    query = resolve_request(service, request, body.model, body.sequences, output=CLASSES, crop=True)
    shares = await service.models.run(about.name, CLASSES, query.texts, request.state.caller)
    cropped = _cropped(about, query.texts)
    content = {
        "model": about.name,
        "kind": about.label_kind,
        "labels": about.labels,
        "data": (
            {
                "id": name,
                "probabilities": values,
                "cropped": left_out,
                **_likeliest(about, values),
                **_sets(about, values, thresholds),
            }
            for name, values, left_out in zip(query.ids, shares, cropped, strict=True)
        ),
    }
    classes = () if about.label_kind == "per_residue" else about.labels
    return await off_loop(
        are_many(shares),
        lambda: arrays_answer(kind, query.ids, shares, "probabilities", content, classes, cropped=cropped),
    )


@router.post("/v1/masked", name="masked", openapi_extra=documented(MaskedBody))
async def masked(
    request: Request, service: Shared, kind: Accepted, body: Annotated[MaskedBody, Depends(reading(MaskedBody))]
) -> Response:
    """Probabilities of the 20 amino acids at each position, and scores of point mutations.

    Tables and .npy hold the scores if there are mutations, otherwise the probabilities.
    """
    query = resolve_request(service, request, body.model, body.sequences, output=MASKED, masks=True)
    is_large = len(body.mutations or ()) > MUTATIONS_AT_ONCE
    # Refuse a wrong mutation before anything is computed.
    mutations = await off_loop(is_large, _mutations, body.mutations, query.texts)
    shares = await _masked_probabilities(service, request, query, body.method)
    content: dict[str, Any] = {
        "model": query.about.name,
        "letters": AMINO_ACIDS,
        "method": body.method,
        "data": [{"id": name, "probabilities": values} for name, values in zip(query.ids, shares, strict=True)],
    }
    if body.mutations is not None:
        scores = await off_loop(is_large, _scores, mutations, shares[0])
        if kind:
            return table_answer(kind, pa.table({"mutation": body.mutations, "score": scores}))
        content["mutations"] = (
            {"mutation": text, "score": score} for text, score in zip(body.mutations, scores.tolist(), strict=True)
        )
    return await off_loop(
        is_large or are_many(shares), arrays_answer, kind, query.ids, shares, "probabilities", content
    )


@router.post("/v1/tokenize", name="tokenize", openapi_extra=documented(SequencesBody))
async def tokenize(
    request: Request, service: Shared, body: Annotated[SequencesBody, Depends(reading(SequencesBody))]
) -> Response:
    """Ids of tokens, special ones included."""
    query = resolve_request(service, request, body.model, body.sequences)
    ids = await service.models.tokens(query.about.name, query.texts)
    data = [{"id": name, "tokens": tokens} for name, tokens in zip(query.ids, ids, strict=True)]
    return await off_loop(are_many(ids), json_answer, {"model": query.about.name, "data": data})


async def _masked_probabilities(
    service: Service, request: Request, query: Query, method: str
) -> list[NDArray[np.float32]]:
    """Return probabilities (L, 20) per sequence, as it is or with each position masked in turn."""
    model = query.about.name
    if method == "wild_type":
        return await _amino_acid_shares(
            query.about, await service.models.run(model, "logits", query.texts, request.state.caller)
        )
    if any(MASK_TEXT in text for text in query.texts):
        raise RefusalError(422, "method masked: masks every position itself; send sequences without <mask>")
    service.access.charge(request.state.key, "residues", masked_residues(service, query.texts))
    rows = await service.models.run(model, EACH_MASKED, query.texts, request.state.caller)
    # One row per residue; split them by sequence.
    ends = np.cumsum(list(map(len, query.texts)))[:-1]
    return await _amino_acid_shares(query.about, np.split(np.concatenate(rows), ends))


def _mutations(texts: list[str] | None, sequences: list[str]) -> list[Mutant] | None:
    """Parse mutants of the only sequence. Raises RefusalError (422) for a mutant that does not fit or has no score."""
    if texts is None:
        return None
    if len(sequences) != 1:
        raise RefusalError(422, "mutations: send them with a single sequence")
    # One letter per mask, so that positions count residues. No mutation can name this letter.
    protein = Protein(sequences[0].replace(MASK_TEXT, "#"))
    mutations = []
    for number, text in enumerate(texts):
        try:
            mutations.append(protein.mutant(text))
        except ValueError as error:
            raise RefusalError(422, f"mutations.{number}: {error}") from None
    return mutations


def _scores(mutations: list[Mutant], probabilities_L20: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the score of each mutant: 0 equals the wild type, above is better."""
    # The logarithm of 0 is infinite, which JSON can't hold.
    logs_L20 = np.log(np.maximum(probabilities_L20, np.finfo(np.float32).tiny))
    return marginal_scores([mutant.mutations for mutant in mutations], logs_L20).astype(np.float32)


def _latents(values: Any, channels: int, number: int) -> NDArray[np.float32]:
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):  # not numbers, rows of different lengths, integers beyond fp32
        array = np.empty(0, np.float32)
    if array.ndim != 2 or array.shape[1] != channels or not len(array) or not np.isfinite(array).all():
        raise RefusalError(422, f"latents.{number}: must be (residues, {channels}) of finite numbers")
    return array


async def _amino_acid_shares(about: About, logits: Arrays) -> list[NDArray[np.float32]]:
    """Return probabilities (L, 20) of the amino acids from logits (L, K) of the vocabulary."""
    # Softmax over the 20 amino acids only: special tokens and rare letters are left out.
    columns = [about.vocabulary.index(letter) for letter in AMINO_ACIDS]
    return await off_loop(are_many(logits), lambda: [softmax(logits_LK[:, columns], axis=1) for logits_LK in logits])


def _cropped(about: About, texts: list[str]) -> list[int]:
    """Return the number of residues of each sequence that the classifier leaves out."""
    # With other tokenizers only the replica knows the number of tokens.
    if about.longest is None or not about.one_token_per_residue:
        return [0] * len(texts)
    return [max(0, len(text) - about.longest) for text in texts]


def _thresholds(about: About, coverage: float | None, kind: str) -> NDArray[np.float64] | None:
    """Return the thresholds of conformal sets; None without a coverage. Raises RefusalError (406, 422)."""
    if coverage is None:
        return None
    if kind:
        raise RefusalError(406, "coverage: only application/json has sets; ask for it", param="coverage")
    try:
        return thresholds_of(about.calibration, coverage)
    except ConfigError as error:
        raise RefusalError(422, str(error), param="coverage") from None


def _sets(about: About, values: NDArray[np.float32], thresholds: NDArray[np.float64] | None) -> dict[str, Any]:
    """Return the conformal set of a sequence, or of each residue, or the ends of the intervals of numbers."""
    if thresholds is None:
        return {}
    if about.label_kind == "regression":
        return {"lower": values - thresholds, "upper": values + thresholds}
    sets = [list(compress(about.labels, row)) for row in (1 - np.atleast_2d(values) <= thresholds).tolist()]
    return {"set": sets if values.ndim == 2 else sets[0]}


def _likeliest(about: About, values: NDArray[np.float32]) -> dict[str, Any]:
    if about.label_kind == "per_residue":
        return {"label": _likeliest_letters(about.labels, values)}
    if about.label_kind == "multilabel":
        return {"label": [name for name, value in zip(about.labels, values, strict=True) if value > 0.5]}
    return {} if about.label_kind == "regression" else {"label": about.labels[int(values.argmax())]}


def _likeliest_letters(letters: Sequence[str], values_LK: NDArray[np.float32]) -> str:
    return "".join(letters[column] for column in values_LK.argmax(1))
