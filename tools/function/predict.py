"""Predict the functions of proteins by a run of the task terms, in CAFA's format.

Writes protein, term and score with three digits, tab-separated: for each protein at most --terms terms, from the
highest score down. No term scores above its parents. Memory grows with the vectors of the proteins alone. Until the
file is complete everything lies in OUTPUT.partial, where the same command resumes.

Examples:
  esmeray function predict runs/function proteins.fasta --output functions.tsv
  esmeray function predict runs/function proteins.fasta.gz --output homology.tsv --part homology --terms 100
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.publishing import refuse_file
from common.text import counted
from train_config.schema import IngestSection

MADE_BY = "predict_function"


class Arguments(ToolArguments):
    """Run, proteins, and what is written."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Field(
        description="Folder of a run of the task terms, trained with train_config/function.yaml."
    )
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FASTA")] = Field(
        description="File, folder, quoted glob, or store."
    )
    output: Path = Field(description="TSV file to write.")
    terms: int = Field(500, gt=0, description="Most terms of a protein, over all aspects.")
    part: Literal["blend", "naive", "homology", "neighbours", "network"] = Field(
        "blend", description="The blend, or one of its parts alone."
    )
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the file if this tool made it and nobody changed it since."
    )
    ingest: Annotated[IngestSection, tyro.conf.arg(name="data.ingest")] = IngestSection()


def main(argv: list[str]) -> int:
    """Predict, and write."""
    arguments = parse(Arguments, argv, "function predict", __doc__)
    refuse_file(arguments.output, MADE_BY, arguments.overwrite)
    from inference.function.prediction import predict  # here: it loads torch

    number = predict(
        arguments.run,
        [arguments.file],
        arguments.output,
        terms=arguments.terms,
        part=arguments.part,
        ingest=arguments.ingest,
        overwrite=arguments.overwrite,
    )
    print(f"{arguments.output}: {counted(number, 'protein{s}')}")
    return 0
