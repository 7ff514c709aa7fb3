"""Evaluate a sequence diffusion model or ProteinMPNN on the structures of a store, or on one part of it.

Prints median recovery of native residues by the likeliest design, and perplexity of the native sequence, with 95 %
intervals. Two baselines come from the store's other structures: the composition, and the composition of each kind of
secondary structure. --evaluate.output also writes the metrics as JSON. Recovery is not designability; see
docs/structdiff.md.

Examples:
  esmeray design evaluate proteinmpnn --evaluate.store unseen_store
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
from esmeray.tools.grammar import ModelPath, OutputWriter, command


class DesignEvaluateSection(DesignModelSection):
    """Structures to evaluate on, and settings of the model."""

    store: Path
    """Structure store of the native structures."""
    part: Literal["all", "training", "validation"] = "all"
    """Part of the store. Use validation if the model was trained on this store."""
    predictions: Path | None = None
    """Folder of predicted structures, for a store without structures."""
    output: Path | None = None
    """JSON file to write the metrics to."""


@command("design evaluate", __doc__, made_by="evaluate_design")
def main(model: ModelPath, evaluate: DesignEvaluateSection, writer: OutputWriter) -> None:
    writer.refuse_file(evaluate.output)  # checked now, because evaluating takes minutes
    exported_design(model)  # checked before torch is loaded
    predicted = None if evaluate.predictions is None else PredictedStructures(evaluate.predictions)
    store = StructureStore(evaluate.store, predictions=predicted)
    records = {"all": np.arange(len(store)), "training": store.training, "validation": store.validation}[evaluate.part]
    if not records.size:
        raise DataError(
            f"{evaluate.store}: has no {evaluate.part} part; to evaluate all records, remove --evaluate.part"
        )
    designer, _ = load_model(model, evaluate)

    from esmeray.inference.design.evaluation import evaluate_designs
    from esmeray.inference.design.sampling import weights_notes

    with record_bar("evaluating") as bar:
        evaluation = evaluate_designs(
            designer,
            store,
            records,
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
    # To stderr, because scripts read the table from stdout.
    print(
        f"evaluated {evaluation.proteins:,} of {counted(len(store), 'record{s}')}; left out: "
        f"{len(store) - records.size:,} in other parts, {evaluation.left_out:,} without structure or native "
        "residues",
        file=sys.stderr,
    )
    for note in weights_notes(designer):
        print(note, file=sys.stderr)
    # Structures seen in training give values that are too good: point to the validation part if there is one.
    if evaluate.part == "all" and store.training.size and store.validation.size:
        print(
            f"{store.validation.size:,} of them are in the store's validation part; to evaluate only these, "
            "give --evaluate.part validation",
            file=sys.stderr,
        )
    metrics = {name: {"value": value, "interval": interval} for name, (value, *interval) in evaluation.metrics.items()}
    content = {"part": evaluate.part, "weights": designer.weights, **dataclasses.asdict(evaluation), "metrics": metrics}
    writer.write_json(evaluate.output, content, indent=2)
