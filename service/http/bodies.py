"""Bodies of requests to checked values within the limits: JSON of each endpoint's schema, FASTA, or arrays.

A refusal names the record, and echoes nothing else.
"""

import io
import re
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dataset.fasta.alphabet import MASK_TEXT, residues_of
from service.contract import About
from service.http.refusals import RefusalError
from train_config.service_schema import LimitsSection

FASTA_TYPES = ("text/x-fasta", "application/x-fasta", "text/plain", "application/octet-stream")
NPY_TYPE = "application/x-npy"
_LETTERS = re.compile(r"[A-Za-z.-]+")
_MASKED_LETTERS = re.compile(rf"(?:[A-Za-z.-]|{MASK_TEXT})+")
_LONGEST_ID = 256
_SHOWN_PROBLEMS = 3

Schema = TypeVar("Schema", bound=BaseModel)


class Record(BaseModel):
    """A sequence with its id."""

    id: Annotated[str, Field(max_length=_LONGEST_ID)]
    sequence: str


Sequences = Annotated[list[str | Record], Field(min_length=1, fail_fast=True)]
"""Its check ends at the first wrong entry: a body has room for millions, each with problems to describe."""


class SequencesBody(BaseModel):
    """Sequences for a model."""

    model_config = ConfigDict(protected_namespaces=())

    model: str | None = Field(None, description="Default: the first of GET /v1/models.")
    sequences: Sequences = Field(description="Sequences, or records with id and sequence.")


async def read(request: Request, schema: type[Schema], sequences_field: str = "sequences") -> Schema:
    """The body as the schema says; FASTA brings the sequences, and the query of the address the other fields.

    Raises RefusalError (400, 413, 415, 422).
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    body = await request.body()
    try:
        if kind == "application/json":
            return schema.model_validate_json(body)
        if kind in FASTA_TYPES:
            return schema.model_validate({**_query(request, schema), sequences_field: _fasta(body)})
        if kind == NPY_TYPE and "latents" in schema.model_fields:
            return schema.model_validate({**_query(request, schema), "latents": [_npy(body)]})
    except ValidationError as error:
        raise _refusal(error) from None
    raise RefusalError(415, f"send application/json, or FASTA as {FASTA_TYPES[0]}")


def _query(request: Request, schema: type[BaseModel]) -> dict[str, Any]:
    """Fields in the query of the address; one of many values is given many times."""
    query = request.query_params
    lists = {name for name, field in schema.model_fields.items() if "list[" in str(field.annotation)}
    return {name: query.getlist(name) if name in lists else query[name] for name in query}


def checked(
    sequences: str | list[str | Record], limits: LimitsSection, about: About, *, masks: bool = False, crop: bool = False
) -> tuple[list[str], list[str]]:
    """Ids and texts of a sequence or many within the limits; of a model of residues, in the letters of its alphabet.

    ``masks`` allows <mask>; ``crop`` says that what is longer than the model takes is cropped by it. Raises
    RefusalError (413, 422) that names the first record that is refused.
    """
    records = [sequences] if isinstance(sequences, str) else sequences
    if len(records) > limits.sequences:
        detail = f"{len(records):,} sequences, more than {limits.sequences:,}; send them in several requests"
        raise RefusalError(413, detail, limit="sequences")
    named = [
        record if isinstance(record, Record) else Record(id=str(number), sequence=record)
        for number, record in enumerate(records)
    ]
    ids, texts = [record.id for record in named], [record.sequence for record in named]
    longest = limits.sequence_residues
    if about.longest is not None and not crop:
        longest = min(longest, about.longest)
    total = 0
    for place, text in enumerate(texts):
        if about.one_token_per_residue:
            text = texts[place] = _residues(text, ids[place], masks)
        elif not text or (not about.labels and not text.isascii()):
            raise RefusalError(422, f"record {ids[place]}: must be text of ASCII, at least a letter", record=ids[place])
        length = residues_of(text)
        if length > longest:
            detail = f"record {ids[place]}: {length:,} residues, more than {longest:,}; send a shorter one"
            raise RefusalError(422, detail, record=ids[place], limit="sequence_residues")
        total += length
    if total > limits.residues:
        detail = f"{total:,} residues, more than {limits.residues:,}; send them in several requests"
        raise RefusalError(413, detail, limit="residues")
    return ids, texts


def _residues(text: str, record: str, masks: bool) -> str:
    letters = text.strip().removesuffix("*")
    pattern = _MASKED_LETTERS if masks else _LETTERS
    if pattern.fullmatch(letters):
        return letters.upper().replace(MASK_TEXT.upper(), MASK_TEXT)
    if not letters:
        raise RefusalError(422, f"record {record}: the sequence is empty", record=record)
    match = pattern.match(letters)
    place = match.end() + 1 if match else 1
    raise RefusalError(422, f"record {record}: the letter at position {place} is no residue", record=record)


def _fasta(body: bytes) -> list[dict[str, str]]:
    """Records of FASTA; its text is that of a person, so blanks and Windows' line ends are no fault."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RefusalError(400, "the body is no text of UTF-8") from error
    if not text.lstrip().startswith(">"):
        raise RefusalError(400, "FASTA starts with '>' and an id")
    records = []
    for number, record in enumerate(("\n" + text.lstrip()).split("\n>")[1:], 1):
        header, _, lines = record.partition("\n")
        name = header.split(maxsplit=1)[0] if header.strip() else str(number)
        records.append({"id": name[:_LONGEST_ID], "sequence": "".join(lines.split())})
    return records


def _npy(body: bytes) -> NDArray[np.float32]:
    try:
        return np.lib.format.read_array(io.BytesIO(body), allow_pickle=False).astype(np.float32)
    except Exception as error:
        raise RefusalError(400, "the body is no .npy file of numbers") from error


def _refusal(error: ValidationError) -> RefusalError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        return RefusalError(400, "the body is no JSON, or nested too deeply")
    shown = [f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems]
    return RefusalError(422, "; ".join(shown[:_SHOWN_PROBLEMS]))
