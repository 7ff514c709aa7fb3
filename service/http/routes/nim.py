"""The route of BioNeMo's ESM-2 NIM: ``POST /v1/biology/meta/esm2-...`` with an npz answer for each sequence."""

import io
import zipfile
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from esmeray.service.http.routes.common import Shared, ask, documented, reading

router = APIRouter()
_FILES = {"content": {"application/octet-stream": {}, "application/zip": {}}, "description": "npz, or a zip of many"}


class NimBody(BaseModel):
    """Sequences, and the kind of file."""

    sequences: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    format: Literal["npz"] = "npz"


@router.post(
    "/v1/biology/meta/esm2-{size}",  # any size is answered by the first model: clients are made for one
    name="encode",
    openapi_extra=documented(NimBody, fasta=False),
    response_class=Response,
    responses={200: _FILES},
)
async def esm2(
    request: Request, size: str, service: Shared, body: Annotated[NimBody, Depends(reading(NimBody))]
) -> Response:
    """``embeddings`` (1, D) and ``representations`` (1, L, D) of each sequence, by the first model."""
    query = ask(service, request, None, list(body.sequences), output="residues")
    # Rows alone, whose mean is the vector: asking for both would run the model twice.
    rows = await service.models.run(query.about.name, "residues", query.texts, query.caller)
    files = [_npz(rows_LD) for rows_LD in rows]
    if len(files) == 1:
        return Response(files[0], media_type="application/octet-stream")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # not compressed: floats hardly get smaller, and it takes a core
        for number, content in enumerate(files):
            archive.writestr(f"{number}.npz", content)
    return Response(buffer.getvalue(), media_type="application/zip")


def _npz(residues_LD: NDArray[np.float32]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, embeddings=residues_LD.mean(axis=0, keepdims=True), representations=residues_LD[None])
    return buffer.getvalue()
