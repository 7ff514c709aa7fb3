"""``POST /v1/search``: neighbours of sequences in an index, or of the index's own proteins.

Shape legend: N sequences or ids, K neighbours of each.
"""

from contextlib import nullcontext
from typing import Annotated

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from esmeray.service.http.answers import are_many, json_answer, off_loop, table_answer
from esmeray.service.http.bodies import MAX_ID_LENGTH, Body, Sequences, check_number
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Accepted, Shared, about_of, charge, documented, reading, resolve_request

router = APIRouter()
WIDE_HITS = 1_000
"""Searches for more neighbours wait for each other: thirty at once would take all cores from small ones."""
Ids = Annotated[list[Annotated[str, Field(max_length=MAX_ID_LENGTH)]], Field(min_length=1, fail_fast=True)]


class SearchBody(Body):
    """Queries of a search, and the number of neighbours of each query."""

    index: str | None = Field(
        default=None, description="Default: the first; GET /v1/models lists the indexes of each model."
    )
    model: str | None = Field(default=None, description="The model of the index; may be left out.")
    sequences: Sequences | None = Field(default=None, description="Sequences, or records with id and sequence.")
    ids: Ids | None = Field(
        default=None,
        description="In place of sequences: ids of proteins in the index. A protein is not its own neighbour.",
    )
    top_k: int = Field(default=10, ge=1, description="Maximum number of neighbours of each query.")


@router.post("/v1/search", name="search", openapi_extra=documented(SearchBody))
async def search(
    request: Request, service: Shared, kind: Accepted, body: Annotated[SearchBody, Depends(reading(SearchBody))]
) -> Response:
    """The nearest proteins of an index, by the embeddings of its model."""
    about = service.models.index(body.index)
    if body.model not in (None, about.model):
        raise RefusalError(422, f"model: index {about.name} is of {about.model}; name another index", param="model")
    if (body.sequences is None) == (body.ids is None):
        raise RefusalError(422, "give either sequences, or ids of the index")
    wanted = len(body.sequences or body.ids or ()) * body.top_k
    check_number(wanted, "neighbours", service.limits)
    async with service.wide_searches.turn(request.state.ongoing) if wanted > WIDE_HITS else nullcontext():
        if body.ids is None:
            query = resolve_request(service, request, about.model, body.sequences or [], output=about.output)
            names = query.ids
            reply = await service.models.search(about, query.texts, body.top_k, request.state.caller)
        else:
            about_of(service, request, about.model, None)
            names = body.ids
            charge(service, request, about.model, len(names), 0)
            reply = await service.models.search_ids(about, names, body.top_k, request.state.caller)

        def answer() -> Response:
            if kind:
                counts_N = [len(ids) for ids in reply.ids]
                columns = {
                    "query": np.repeat(names, counts_N),
                    "rank": np.concatenate([np.arange(1, count + 1) for count in counts_N]),
                    "target": [name for ids in reply.ids for name in ids],
                    "score": np.concatenate(reply.results),
                }
                return table_answer(kind, pa.table(columns))
            return json_answer(
                {
                    "index": about.name,
                    "model": about.model,
                    "metric": about.metric,
                    "data": [
                        {"id": name, "neighbours": _neighbours(ids, scores.tolist())}
                        for name, ids, scores in zip(names, reply.ids, reply.results, strict=True)
                    ],
                }
            )

        return await off_loop(are_many(reply.results), answer)


def _neighbours(ids: list[str], scores: list[float]) -> list[dict[str, str | int | float]]:
    return [
        {"rank": rank, "id": name, "score": score}
        for rank, (name, score) in enumerate(zip(ids, scores, strict=True), 1)
    ]
