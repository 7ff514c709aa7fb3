"""Parse request bodies into checked values within the limits: JSON by the endpoint's schema, FASTA, or arrays.

Limits are checked on the bytes, before any value is built: 16 MB of the shortest records would become 8 GB of Python
objects. A refusal names the record or the unknown field and repeats nothing else.
"""

import io
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from esmeray.common.errors import did_you_mean
from esmeray.dataset.fasta.alphabet import MASK_TEXT, residues_of
from esmeray.service.contract import About
from esmeray.service.http.answers import off_loop
from esmeray.service.http.refusals import RefusalError, printable
from esmeray.service.section import LimitsSection

FASTA_TYPES = ("text/x-fasta", "application/x-fasta", "text/plain", "application/octet-stream")
NPY_TYPE = "application/x-npy"
_LETTERS = re.compile(r"[A-Za-z]+")
"""Letters of the store's alphabet in any case, and J. Gaps of alignments are refused, as in the commands."""
_MASKED_LETTERS = re.compile(rf"(?:[A-Za-z]|{MASK_TEXT})+")
MAX_ID_LENGTH = 256
_MAX_HEADER_BYTES = 4 * MAX_ID_LENGTH  # a character of UTF-8 has at most four bytes
_MASK = MASK_TEXT.encode()
SMALL_BYTES = 65_536
"""Bodies up to this size are parsed in the event loop, larger ones in a thread."""
_COSTS_BYTES = {b",": 40, b'"': 28, b":": 60, b"[": 80, b"{": 250}
"""Upper bounds on the bytes of Python values, by the JSON character that announces them.

Comma: a number and the list's pointer to it. Quote: half a short string. Colon: an entry of a dictionary. Brackets: a
list, a dictionary."""
_CHEAP_BYTES = 8_000_000
_MAX_RELATIVE = 5
"""A body's values may take _CHEAP_BYTES, or _MAX_RELATIVE times the body; the body and its copies come on top."""
_SHOWN_PROBLEMS = 3
"""Number of faults that a refusal names."""

Schema = TypeVar("Schema", bound=BaseModel)


class Body(BaseModel):
    """Fields of a JSON object. Unknown fields are refused: a misspelled one would be ignored silently."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, values: Any) -> Any:
        # Stops at the first: pydantic's own check would describe each of a million unknown fields.
        for unknown in unknown_names(values if isinstance(values, dict) else (), cls.model_fields):
            raise PydanticCustomError("unknown_field", "unknown field {unknown}", {"unknown": unknown})
        return values


class Record(Body):
    """A sequence with its id."""

    id: Annotated[str, Field(max_length=MAX_ID_LENGTH)]
    sequence: str


def _type_name(value: Any) -> str:
    """Return the tag of a value in a union, so that its problems are described for its own type only."""
    return type(value).__name__


Entry = Annotated[
    Annotated[str, Tag("str")] | Annotated[Record, Tag("dict")],
    Discriminator(
        _type_name,
        custom_error_type="entry",
        custom_error_message="must be a sequence, or an object with id and sequence; not a number, null or token ids",
    ),
]
Sequences = Annotated[list[Entry], Field(min_length=1, fail_fast=True)]
"""Sequences or records. The check stops at the first wrong entry, since a body may hold millions."""
OneOrMany = Annotated[
    Annotated[str, Tag("str")] | Annotated[Sequences, Tag("list")],
    Discriminator(
        _type_name,
        custom_error_type="input",
        custom_error_message="must be a sequence, or a list of at least one",
    ),
]


class SequencesBody(Body):
    """Sequences for a model."""

    model: str | None = Field(default=None, description="Default: the first of GET /v1/models.")
    sequences: Sequences = Field(description="Sequences, or records with id and sequence.")


async def read(
    request: Request, schema: type[Schema], limits: LimitsSection, sequences_field: str = "sequences"
) -> Schema:
    """Read the body by the schema. FASTA holds only the sequences; the query of the address holds the other fields.

    Raises RefusalError (400, 413, 415, 422).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", *FASTA_TYPES) and not (kind == NPY_TYPE and "latents" in schema.model_fields):
        raise RefusalError(
            415, f"send application/json, or FASTA as {FASTA_TYPES[0]}; the header Content-Type names it"
        )
    query = _query(request, schema, sequences_field)  # before the body arrives: a name may be misspelled
    body = await request.body()
    return await off_loop(len(body) > SMALL_BYTES, _parsed, kind, body, query, schema, limits, sequences_field)


def _parsed(
    kind: str, body: bytes, query: dict[str, Any], schema: type[Schema], limits: LimitsSection, sequences_field: str
) -> Schema:
    if kind == "application/json":
        fields = _json(body, schema, limits)
    elif kind in FASTA_TYPES:
        fields = {sequences_field: _fasta(body, limits)}
    else:
        fields = {"latents": [_npy(body, limits)]}
    twice = sorted(fields.keys() & query.keys())
    if twice:  # which of the two is meant is unknown
        raise RefusalError(422, f"{twice[0]}: is in the query of the address and in the body; give it once")
    try:
        # JSON has types; the query of an address is text, which has to be converted.
        return schema.model_validate({**query, **fields}, strict=kind == "application/json" and not query)
    except ValidationError as error:
        raise _refusal(error, schema) from None


def _query(request: Request, schema: type[BaseModel], sequences_field: str) -> dict[str, Any]:
    """Read the fields in the query of the address. A field with several values is repeated."""
    query = request.query_params
    # Sequences and latents only come in the body: an address is short, and ends up in logs.
    fields = {name: field for name, field in schema.model_fields.items() if name not in (sequences_field, "latents")}
    check_query(request, fields)
    lists = {name for name, field in fields.items() if "list[" in str(field.annotation)}
    values = {name: query.getlist(name) for name in query}
    # A repeated field that takes one value stays a list, which its schema refuses.
    return {name: many[0] if len(many) == 1 and name not in lists else many for name, many in values.items()}


def check_query(request: Request, names: Collection[str]) -> None:
    """Refuse (422) unknown parameters: a misspelled one would be ignored silently."""
    for unknown in unknown_names(request.query_params, names):
        raise RefusalError(422, f"the query of the address has an unknown parameter {unknown}")


def unknown_names(names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yield each unknown name with a list of the known ones."""
    for name in names:
        if name not in known:
            yield (
                f"{printable(name, longest=40)!r}{did_you_mean(name[:MAX_ID_LENGTH], known)}; "
                f"there are {', '.join(known) or 'none'}"
            )


def checked(
    sequences: str | list[str | Record],
    limits: LimitsSection,
    about: About,
    *,
    masks: bool = False,
    crop: bool = False,
    cut: str = "",
) -> tuple[list[str], list[str]]:
    """Check sequences against the limits and the model's alphabet; return their ids and texts.

    Args:
        sequences: one sequence, or many sequences or records.
        limits: limits of the service.
        about: the model.
        masks: allow <mask>.
        crop: accept sequences that are too long for the model, which crops them.
        cut: end at which sequences that are too long are cut off here: left, right, or '' for none. For models with
            one token per residue.

    Raises RefusalError (413, 422), which names the first refused record.
    """
    records = [sequences] if isinstance(sequences, str) else sequences
    check_number(len(records), "sequences", limits)
    ids = [record.id if isinstance(record, Record) else str(number) for number, record in enumerate(records)]
    texts = [record.sequence if isinstance(record, Record) else record for record in records]
    longest = (
        limits.sequence_residues if crop else min(limits.sequence_residues, about.longest or limits.sequence_residues)
    )
    total = 0
    for index, (name, text) in enumerate(zip(ids, texts, strict=True)):
        if about.one_token_per_residue:
            # Remove line ends, and the * at the end of a translation, as in FASTA files.
            text = "".join(map(str.strip, text.splitlines())).removesuffix("*")
            if cut:  # only here, since the length in tokens is unknown for other models
                text = _residues(text, name, masks)  # checks the part that is cut off too
                text = text[:longest] if cut == "right" else text[-longest:]
        length = residues_of(text)
        if length > longest:
            raise RefusalError(
                422,
                f"record {name}: {length:,} residues, more than {longest:,}; send a shorter one",
                record=name,
                limit="sequence_residues",
            )
        total += length
        check_number(total, "residues", limits)  # before the letters are checked, which may take seconds
        if about.one_token_per_residue:
            texts[index] = _residues(text, name, masks)
        # Protein vocabularies are ASCII; text classifiers take any language.
        elif not text or (not about.labels and not text.isascii()):
            raise RefusalError(422, f"record {name}: must be ASCII text of at least one letter", record=name)
    return ids, texts


def _residues(letters: str, record: str, masks: bool) -> str:
    pattern = _MASKED_LETTERS if masks else _LETTERS
    if pattern.fullmatch(letters):
        residues = letters.upper().replace("J", "X")  # as in stores (esmeray/dataset/fasta/alphabet.py)
        return residues.replace(MASK_TEXT.upper(), MASK_TEXT)  # the tokenizer only knows it in lower case
    if not letters:
        raise RefusalError(422, f"record {record}: the sequence is empty", record=record)
    match = pattern.match(letters)
    position = match.end() + 1 if match else 1
    raise RefusalError(422, f"record {record}: the letter at position {position} is not a residue", record=record)


def _json(body: bytes, schema: type[BaseModel], limits: LimitsSection) -> dict[str, Any]:
    """Parse the body as a JSON object, after bounding the memory of its values by counting bytes."""
    built_bytes = sum(body.count(letter) * cost_bytes for letter, cost_bytes in _COSTS_BYTES.items())
    if built_bytes > max(_CHEAP_BYTES, _MAX_RELATIVE * len(body)):
        raise RefusalError(
            413, "the body has too many short values; send fewer, latents as .npy, or sequences as FASTA"
        )
    try:
        # pydantic's parser: faster than json, and with a limit on the depth.
        content = from_json(body)
    except ValueError:
        raise RefusalError(400, "the body is not JSON, or nested too deeply") from None
    if not isinstance(content, dict):
        raise RefusalError(422, f"the body must be a JSON object with {', '.join(schema.model_fields)}")
    for name, value in content.items():
        if isinstance(value, list):  # sequences, mutations, or latents per sequence
            check_number(len(value), "mutations" if name == "mutations" else "sequences", limits)
    return content


def check_number(
    number: int, unit: Literal["sequences", "mutations", "residues", "neighbours"], limits: LimitsSection
) -> None:
    most: int = getattr(limits, unit)
    if number > most:
        raise RefusalError(413, f"{number:,} {unit}, more than {most:,}; ask for fewer at once", limit=unit)


def _fasta(body: bytes, limits: LimitsSection) -> list[dict[str, str]]:
    """Parse FASTA. People edit such text, so blanks and Windows line ends are accepted.

    Records and residues are counted on the bytes: text takes up to four times as much memory, lists of lines twenty.
    """
    body = body.removeprefix(BOM_UTF8).lstrip()
    if not body.startswith(b">"):
        raise RefusalError(400, "FASTA starts with '>' and an id")
    # Count the records before splitting.
    check_number(body.count(b"\n>") + 1, "sequences", limits)
    records: list[dict[str, str]] = []
    residues = 0
    for number, record in enumerate(body[1:].split(b"\n>"), 1):
        header, _, lines = record.partition(b"\n")
        sequence = lines.translate(None, b" \t\r\n\v\f")
        residues += len(sequence) - sequence.count(_MASK) * (len(_MASK) - 1)
        check_number(residues, "residues", limits)
        # Cut before decoding: the header may be the whole body.
        words = header[:_MAX_HEADER_BYTES].decode("utf-8", "replace").split(maxsplit=1)
        name = words[0][:MAX_ID_LENGTH] if words else str(number)
        try:
            records.append({"id": name, "sequence": sequence.decode("utf-8")})
        except UnicodeDecodeError as error:
            raise RefusalError(400, "the body is not UTF-8 text") from error
    return records


def _npy(body: bytes, limits: LimitsSection) -> NDArray[np.float32]:
    try:
        array = np.lib.format.read_array(io.BytesIO(body), allow_pickle=False).astype(np.float32)
    except Exception as error:  # NumPy evaluates the header as a Python literal, which can raise anything
        raise RefusalError(400, "the body is not a .npy file of numbers") from error
    if array.ndim == 2:
        check_number(len(array), "residues", limits)
    return array


def _refusal(error: ValidationError, schema: type[BaseModel]) -> RefusalError:
    """Return a refusal that names the first wrong fields."""
    names = {*schema.model_fields, *Record.model_fields}
    problems = error.errors(include_url=False, include_context=False, include_input=False)[:_SHOWN_PROBLEMS]
    # Other names are pydantic's tags, or keys of the body, which must not be repeated.
    paths = [
        ".".join(str(step) for step in problem["loc"] if isinstance(step, int) or step in names) for problem in problems
    ]
    sentences = [f"{path or 'body'}: {problem['msg']}" for path, problem in zip(paths, problems, strict=True)]
    return RefusalError(422, "; ".join(sentences), param=paths[0] or None)
