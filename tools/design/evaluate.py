"""Evaluate a trained sequence diffusion on the structures of a structure store, all of them or a part.

Prints, and writes as JSON if asked, with 95 % intervals: median recovery of native residues by the likeliest design,
and perplexity of the native sequence, beside two baselines from the store's other structures: the composition alone,
and that of each kind of secondary structure. Recovery is not designability; see docs/structdiff.md.

Examples:
  esmeray design evaluate runs/structdiff --evaluate.store unseen_store
  esmeray design evaluate runs/structdiff --evaluate.store folds_store --evaluate.part validation \
--evaluate.output metrics.json
"""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import numpy as np
from rich.table import Table

from esmeray.common.command_line import result_console
from esmeray.common.errors import DataError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.structures.predictions import PredictedStructures
from esmeray.dataset.structures.store import StructureStore
from esmeray.inference.design.request import DesignModelSection, exported_design, load_model
from esmeray.tools.grammar import OnModel, command
from esmeray.train_config.section import PositiveInt


class DesignEvaluateSection(DesignModelSection):
    """Structures to evaluate on, and how the model runs."""

    store: Path
    """Structure store of the native structures."""
    part: Literal["all", "training", "validation"] = "all"
    """Part of the store: validation, where the model was trained on the rest."""
    predictions: Path | None = None
    """Folder of predicted structures, of a store that has none of its own."""
    steps: PositiveInt = 20
    """Steps of denoising for each sequence."""
    output: Path | None = None
    """JSON file to write the metrics to."""


class Arguments(OnModel):
    """The model, and the native structures."""

    made_by = "evaluate_design"

    evaluate: DesignEvaluateSection


@command("design evaluate", __doc__, Arguments)
def main(arguments: Arguments) -> None:
    options = arguments.evaluate
    arguments.refuse_file(options.output)  # before the minutes of evaluating, not after them
    exported_design(arguments.model)  # another kind of model is refused before torch is loaded
    store = StructureStore(
        options.store,
        predictions=None if options.predictions is None else PredictedStructures(options.predictions),
    )
    parts = {"all": np.arange(len(store)), "training": store.training, "validation": store.validation}
    records = parts[options.part]
    if not records.size:
        raise DataError(f"{options.store}: has no {options.part} part; leave --evaluate.part out to evaluate all of it")
    model, _ = load_model(arguments.model, options)

    from esmeray.inference.design.evaluation import evaluate_designs

    with record_bar("evaluating") as bar:
        evaluation = evaluate_designs(
            model,
            store,
            records,
            steps=options.steps,
            tokens=options.tokens,
            progress=lambda done, total: bar(done / total, done),
        )
    table = Table(
        "metric",
        "value",
        "95 % interval",
        title=counted(evaluation.proteins, "protein{s}"),
        title_justify="left",
    )
    for name, (value, low, high) in evaluation.metrics.items():
        table.add_row(name, f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    result_console().print(table)
    # Beside the table, which scripts read from stdout.
    print(
        f"evaluated {evaluation.proteins:,} of {counted(len(store), 'record{s}')}; left out: "
        f"{len(store) - records.size:,} of other parts, {evaluation.left_out:,} without structure or native residue",
        file=sys.stderr,
    )
    # Structures that the model has seen flatter it: who has a split is told of the honest number.
    if options.part == "all" and store.training.size and store.validation.size:
        print(
            f"{store.validation.size:,} of them are the store's validation part: --evaluate.part validation",
            file=sys.stderr,
        )
    metrics = {name: {"value": value, "interval": interval} for name, (value, *interval) in evaluation.metrics.items()}
    content = {"part": options.part, **dataclasses.asdict(evaluation), "metrics": metrics}
    arguments.write_json(options.output, content, indent=2)
