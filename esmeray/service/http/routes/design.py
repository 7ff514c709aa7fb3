"""Sequences for a backbone structure: ``POST /v1/design``."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pyarrow as pa
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import StructuresSection
from esmeray.dataset.structures.store import StructureCounts
from esmeray.inference.design.positions import bias_of, fixed_positions, tied_positions
from esmeray.service.contract import DESIGNS, DesignOrder
from esmeray.service.http.answers import json_answer, off_loop, table_answer
from esmeray.service.http.bodies import Body, check_number
from esmeray.service.http.refusals import RefusalError
from esmeray.service.http.routes.common import Accepted, Shared, about_of, charge, documented, reading
from esmeray.service.section import LimitsSection

router = APIRouter()
STRUCTURE_LETTERS = 4_000_000
"""Maximum length of a structure's text. A parser's values may take fifty times as many bytes as the text."""


class DesignBody(Body):
    """A structure, and the designs to generate for it."""

    model: str | None = Field(default=None, description="Default: the first of GET /v1/models.")
    structure: str = Field(max_length=STRUCTURE_LETTERS, description="Text of a PDB or mmCIF file.")
    chains: str = Field(
        default="each", max_length=10_000, description="Chains to design: each, first, complex, or names, e.g. A,B."
    )
    number: int = Field(default=1, ge=1, description="Number of designs per structure.")
    fix: str = Field(
        default="",
        max_length=10_000,
        description="Residues that keep their amino acid, by the file's numbers, e.g. 1-10.",
    )
    omit: str = Field(default="", pattern=f"^[{AMINO_ACIDS}]{{0,19}}$", description="Amino acids to exclude, e.g. CM.")
    tie: str = Field(
        default="", max_length=10_000, description="Chains of a complex that get the same residues, e.g. A,B."
    )
    temperature: float = Field(default=0.1, ge=0, le=1000, allow_inf_nan=False, description="0: the likeliest residue.")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of the random draws.")


@router.post("/v1/design", name="design", openapi_extra=documented(DesignBody, fasta=False))
async def design(
    request: Request,
    service: Shared,
    kind: Accepted,
    body: Annotated[DesignBody, Depends(reading(DesignBody, "structure"))],
) -> Response:
    """Sequences for the chains of a structure, with scores: the log-likelihood per residue in nats.

    The notes name what was changed or left out in the structure, and published weights with their license.
    """
    about = about_of(service, request, body.model, DESIGNS)
    # In a thread, since parsing a large structure takes seconds.
    orders, notes = await off_loop(True, _orders, body, service.limits)
    charge(service, request, about.name, len(orders), sum(len(order.structure.residues) for order in orders))
    records = await service.models.run(about.name, DESIGNS, orders, request.state.caller)
    data: list[dict[str, Any]] = [
        {"id": f"{order.structure.id}_{order.number + 1}", "structure": order.structure.id}
        | dict(zip(record.dtype.names, record.item(), strict=True))
        for order, record in zip(orders, records, strict=True)
    ]
    for row in data:
        if row["score"] != row["score"]:  # no residue was judged; NaN is not JSON
            row["score"] = None
    if kind:
        return table_answer(kind, pa.Table.from_pylist(data))
    return json_answer({"model": about.name, "data": data, "notes": [*about.notes, *notes]})


def _orders(body: DesignBody, limits: LimitsSection) -> tuple[list[DesignOrder], list[str]]:
    """Parse the structure. Raises RefusalError (413, 422)."""
    from esmeray.dataset.structures.files import read_structures  # here: it loads biotite, in 0.7 s

    check_number(body.number, "sequences", limits)
    counts = StructureCounts()
    # Equal requests share results, and are known by this digest.
    key = hashlib.sha256(body.model_dump_json(exclude={"number"}).encode()).digest()
    with TemporaryDirectory() as folder:
        path = Path(folder, "structure.pdb")  # the format is recognized by content
        path.write_text(body.structure, encoding="utf-8")
        try:
            section = StructuresSection(chains=body.chains, predicted=False)
            structures = read_structures(path, section, counts, min_residues=1)
            residues = body.number * sum(len(structure.residues) for structure in structures)
            check_number(body.number * len(structures), "sequences", limits)
            check_number(residues, "residues", limits)
            if max(len(structure.residues) for structure in structures) > limits.sequence_residues:
                raise DataError(f"structure: a chain has more than {limits.sequence_residues:,} residues")
            options = []
            for structure in structures:
                fixed, _ = fixed_positions(body.fix, structure, "fix")
                bias = bias_of({}, body.omit, structure)
                options.append((fixed, bias, tied_positions(body.tie, structure, fixed)))
        except (ConfigError, DataError) as error:
            text = str(error).replace(f"{path}", "structure").replace("--generate.", "")
            raise RefusalError(422, text, param="structure") from None
    orders = [
        DesignOrder(key, structure, *values, body.temperature, body.seed, number)
        for structure, values in zip(structures, options, strict=True)
        for number in range(body.number)
    ]
    return orders, counts.lines()
