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
from esmeray.inference.design.calls import DesignModelSection, exported_design, load_model
from esmeray.tools.grammar import Made, OfModel, command
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


@command("design evaluate", __doc__, made_by="evaluate_design")
def main(model: OfModel, evaluate: DesignEvaluateSection, made: Made) -> None:
    made.refuse_file(evaluate.output)  # before the minutes of evaluating, not after them
    exported_design(model)  # another kind of model is refused before torch is loaded
    store = StructureStore(
        evaluate.store,
        predictions=None if evaluate.predictions is None else PredictedStructures(evaluate.predictions),
    )
    records = {"all": np.arange(len(store)), "training": store.training, "validation": store.validation}[evaluate.part]
    if not records.size:
        raise DataError(
            f"{evaluate.store}: has no {evaluate.part} part; leave --evaluate.part out to evaluate all of it"
        )
    diffusion, _ = load_model(model, evaluate)

    from esmeray.inference.design.evaluation import evaluate_designs

    with record_bar("evaluating") as bar:
        evaluation = evaluate_designs(
            diffusion,
            store,
            records,
            steps=evaluate.steps,
            tokens=evaluate.tokens,
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
    # Structures that the model has seen flatter it: who has a split gets the honest value.
    if evaluate.part == "all" and store.training.size and store.validation.size:
        print(
            f"{store.validation.size:,} of them are the store's validation part: --evaluate.part validation",
            file=sys.stderr,
        )
    metrics = {name: {"value": value, "interval": interval} for name, (value, *interval) in evaluation.metrics.items()}
    content = {"part": evaluate.part, **dataclasses.asdict(evaluation), "metrics": metrics}
    made.write_json(evaluate.output, content, indent=2)
