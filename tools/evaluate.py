"""Score a trained classifier on a labelled file, or on what its run held out.

Reads the file with the settings of the run (where labels stand, what to do without one), predicts, and writes a
folder: report.md to read, evaluation.json with all metrics and their bootstrap intervals, and pictures of confusion,
ranking and calibration. It lies in the folder of the run, as evaluations/FILE; of a model without a run here, as
evaluation-FILE. Settings are given anew after the file and the options, as --data.labels.label_columns class.
Whether the model was trained on records of a file is for you to know; without a file they are those that the run held
out, whatever its split.

Examples:
  python -m tools evaluate runs/locations --baselines
  python -m tools evaluate runs/locations held_out.fasta
  python -m tools evaluate my-classifier proteins.csv --output report --data.labels.label_columns location
  python -m tools evaluate runs/locations table.csv --part test --baselines
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.publishing import made_folder, refuse_existing
from common.text import counted
from inference.options import PipelineOptions, load_pipeline
from train_config.overrides import parse_with_settings
from train_config.section import Overrides

if TYPE_CHECKING:
    import numpy as np

    from dataset.labels.label_space import LabelSpace
    from inference.classifier import ClassifierPipeline
    from inference.labelled import LabelledTexts
from train_config.schema import Config

_UNWRAPPED_WIDTH = 10_000
MADE_BY = "evaluate"
Part = Literal["all", "training", "validation", "test"]


class Arguments(PipelineOptions):
    """What to score, on what, and how."""

    file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = Field(
        None, description="Labelled file, folder or quoted glob. Default: the run's own records."
    )
    output: Path | None = Field(
        None,
        description="Folder of the report. Default: RUN/evaluations/FILE-PART, or evaluation-FILE-PART.",
    )
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder if it is an evaluation that nobody changed since."
    )
    part: Part | None = Field(
        None,
        description=(
            "Which records: of a file by the split column of the run's settings, all by default; of the run's own by "
            "its split, those held out for validation by default."
        ),
    )
    baselines: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Fit simple baselines on what the run was trained on and set their figures beside."
    )


def main(argv: list[str]) -> int:
    """Read, predict, write the report, print its table."""
    arguments, overrides = parse_with_settings(Arguments, argv, "evaluate", __doc__)
    # Here, so that --help and a wrong option answer at once. What is wrong with the model's folder, the settings or the
    # data is said before torch is loaded, which takes seconds.
    from inference.exported import config_of, label_space_of

    space = label_space_of(arguments.model)
    config = config_of(arguments.model, overrides)
    part = arguments.part or ("all" if arguments.file else "validation")
    output = arguments.output or _output(arguments, part)
    refuse_existing(output, MADE_BY, arguments.overwrite)
    texts = _texts(arguments, config, space, part, overrides)
    training = _training_texts(arguments, space, texts) if arguments.baselines else None
    pipeline = load_pipeline(arguments, config)
    baselines = _baselines(config, space, training, texts) if training is not None else {}
    data = arguments.file or f"the run's own ({', '.join(config.data.source)})"
    facts = {"model": str(arguments.model), "data": data, "part": part}
    with made_folder(output.absolute(), MADE_BY, arguments.overwrite) as building:
        evaluation = evaluate(pipeline, config, texts, building, facts, baselines)
    # Into a file or pipe nothing is wrapped.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED_WIDTH)
    console.print(figures_table(evaluation))
    for name, number in evaluation["counts"].items():
        console.print(escape(f"  {counted(number, name.replace('_', ' ').replace('records ', 'record{s} '))}"))
    console.print(f"written: {escape(str(output))}/report.md and evaluation.json")
    return 0


def evaluate(
    pipeline: ClassifierPipeline,
    config: Config,
    texts: LabelledTexts,
    output: Path,
    facts: Mapping[str, Any],
    baselines: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Predict and write the report.

    Args:
        pipeline: the classifier.
        config: how many resamplings, and which figure the model was chosen by.
        texts: with their targets.
        output: folder to write the report to.
        facts: what else the report tells.
        baselines: predictions of others for all rows of the texts.

    Returns:
        What evaluation.json holds.
    """
    from inference.labelled import kept_rows
    from inference.output import record_bar
    from inference.report import write_report

    with record_bar("predicting") as bar:
        predictions = pipeline.predict(texts.texts, progress=lambda done, total: bar(done / total, done))
    rows = kept_rows(predictions)
    targets = texts.targets if rows is None else texts.targets[rows]
    counts = {name: number for name, number in texts.counts.items() if number}
    if cropped := int((predictions.cropped > 0).sum()):
        counts["records_cropped"] = cropped
    best_metric = config.model.classifier.best_metric
    return write_report(
        output,
        pipeline.label_space,
        texts.ids,
        predictions.probabilities,
        targets,
        {name: values if rows is None else values[rows] for name, values in baselines.items()},
        counts,
        best_of=None if best_metric == "auto" else best_metric,
        seed=config.run.seed,
        samples=config.model.classifier.bootstrap,
        weights=texts.weights,
        lengths=predictions.lengths,
        facts={**facts, "device": str(pipeline.device), "precision": pipeline.amp_dtype},
    )


def figures_table(evaluation: Mapping[str, Any]) -> Table:
    """The figures, their intervals dimmed, and those of the baselines."""
    judged = {"model": evaluation, **evaluation["baselines"]}
    share = evaluation["bootstrap"]["share"]
    unit = f"{counted(evaluation['residues'], 'residue{s}')} of " if "residues" in evaluation else ""
    title = f"{evaluation['kind']}: {unit}{counted(evaluation['records'], 'record{s}')}"
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in judged:
        table.add_column(escape(name), justify="right")
        table.add_column(f"{share:.0%} of resamplings", justify="right", style="dim")
    for figure in evaluation["figures"]:
        table.add_row(escape(figure), *(cell for one in judged.values() for cell in _cells(one, figure)))
    return table


def _cells(judged: Mapping[str, Any], figure: str) -> list[str]:
    if figure not in judged["figures"]:
        return ["-", ""]
    interval = judged["intervals"].get(figure)
    return [f"{judged['figures'][figure]:.4f}", f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else ""]


def _output(arguments: Arguments, part: Part) -> Path:
    """A folder in that of the run, where the model is of one; else here."""
    from inference.exported import run_folder

    name: str = part
    if arguments.file is not None:
        stem = Path(arguments.file).resolve().name.split(".")[0]
        name = stem if part == "all" else f"{stem}-{part}"
    run = run_folder(arguments.model)
    return Path(f"evaluation-{name}") if run is None else run / "evaluations" / name


def _texts(arguments: Arguments, config: Config, space: LabelSpace, part: Part, overrides: Overrides) -> LabelledTexts:
    from inference.labelled import read_texts

    if arguments.file is None:
        return _own_texts(arguments, space, part)
    return read_texts([arguments.file], config, space, part, overrides)


def _own_texts(arguments: Arguments, space: LabelSpace, part: Part) -> LabelledTexts:
    """Of the run, by its own settings: those given anew are for the file."""
    from common.progress import conversion_bar
    from inference.exported import config_of
    from inference.labelled import own_texts

    with conversion_bar("reading the run's data") as progress:
        return own_texts(config_of(arguments.model), space, part, progress)


def _training_texts(arguments: Arguments, space: LabelSpace, texts: LabelledTexts) -> LabelledTexts:
    """Records that the run was trained on, less the texts of the file."""
    from inference.labelled import without_texts

    return without_texts(_own_texts(arguments, space, "training"), set(texts.texts))


def _baselines(
    config: Config, space: LabelSpace, training: LabelledTexts, texts: LabelledTexts
) -> dict[str, np.ndarray]:
    """Predictions of the baselines."""
    from inference.baselines import baselines

    content = config.model.tokenizer.content
    found = baselines(space.kind, content, training.texts, training.targets, texts.texts, space.num_outputs)
    return dict(found)
