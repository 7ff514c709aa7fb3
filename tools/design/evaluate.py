"""Evaluate a trained sequence diffusion on the structures of a structure store, all of them or a part.

Prints, and writes as JSON if asked, with 95 % intervals: median recovery of native residues by the likeliest design,
and perplexity of the native sequence, beside two baselines from the store's other structures: the composition alone,
and that of each kind of secondary structure. Recovery is not designability; see docs/structdiff.md.

Examples:
  esmeray design evaluate runs/structdiff --store unseen_store
  esmeray design evaluate runs/structdiff --store folds_store --part validation --output metrics.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from pydantic import Field
from rich.table import Table

from common.arguments import parse
from common.command_line import result_console
from common.errors import DataError
from common.progress import record_bar
from common.publishing import made_file, refuse_file
from common.text import counted
from dataset.structures.predictions import PredictedStructures
from dataset.structures.store import StructureStore
from inference.design.request import ModelOptions, load_model
from inference.models.source import exported_by

MADE_BY = "evaluate_design"


class Arguments(ModelOptions):
    """What to evaluate on."""

    store: Path = Field(description="Structure store.")
    part: Literal["all", "training", "validation"] = Field(
        "all", description="Part of the store: validation, where the model was trained on the rest."
    )
    predictions: Path | None = Field(None, description="Predicted structures, of a store that has none of its own.")
    steps: int = Field(20, gt=0, description="Steps of denoising.")
    output: Path | None = Field(None, description="JSON file to write.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the file if this tool made it and nobody changed it since."
    )


def main(argv: list[str]) -> int:
    """Evaluate, print, write."""
    arguments = parse(Arguments, argv, "design evaluate", __doc__)
    made = (MADE_BY, arguments.overwrite)
    if arguments.output is not None:
        refuse_file(arguments.output, *made)
    exported_by("diffusion", arguments.model)
    predictions = None if arguments.predictions is None else PredictedStructures(arguments.predictions)
    store = StructureStore(arguments.store, predictions=predictions)
    parts = {"all": np.arange(len(store)), "training": store.training, "validation": store.validation}
    records = parts[arguments.part]
    if not records.size:
        raise DataError(f"{arguments.store}: has no {arguments.part} part; leave --part out to evaluate all of it")
    model, _ = load_model(arguments)

    from inference.design.evaluation import evaluate_designs

    with record_bar("evaluating") as bar:
        found = evaluate_designs(
            model,
            store,
            records,
            steps=arguments.steps,
            tokens=arguments.tokens,
            progress=lambda done, total: bar(done / total, done),
        )
    table = Table("metric", "value", "95 % interval", title=counted(found.proteins, "protein{s}"), title_justify="left")
    for name, (value, low, high) in found.metrics.items():
        table.add_row(name, f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    result_console().print(table)
    evaluated = f"evaluated {found.proteins:,} of {counted(len(store), 'record{s}')}"
    left_out = f"{len(store) - records.size:,} of other parts, {found.left_out:,} without structure or native residue"
    print(f"{evaluated}; left out: {left_out}", file=sys.stderr)
    if arguments.part == "all" and store.training.size and store.validation.size:
        print(f"{store.validation.size:,} of them are the store's validation part: --part validation", file=sys.stderr)
    if arguments.output is not None:
        rows = {name: {"value": value, "interval": [low, high]} for name, (value, low, high) in found.metrics.items()}
        with made_file(arguments.output, *made) as building:
            content = {"part": arguments.part, "proteins": found.proteins, "left_out": found.left_out, "metrics": rows}
            building.write_text(json.dumps(content, indent=2) + "\n")
    return 0
