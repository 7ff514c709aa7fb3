"""Evaluate a trained classifier on a labelled file, or on the records that its run held out.

The file is read with the settings of the run, such as the columns of labels. Options such as
--data.labels.label_columns class override them. Without a file, the records that the run held out are evaluated,
whatever its split.

Writes a folder: report.md, evaluation.json with all metrics and their bootstrap intervals, and pictures of confusion,
ranking and calibration. By default it is evaluations/INPUT in the folder of the run, or evaluation-INPUT in the current
folder for a model without a run.

For a file, reports how many of its sequences the model was trained on, and gives the metrics of all records and of the
others. If the model's run is not available, that number is unknown.

Proteins are also compared with the training proteins: the report has the metrics by identity with the nearest one, and
a warning about near copies. At most 2,000 are compared, chosen at random.

Examples:
  esmeray classify evaluate runs/locations --evaluate.baselines true
  esmeray classify evaluate runs/locations --evaluate.input held_out.fasta
  esmeray classify evaluate my-classifier --evaluate.input proteins.csv --evaluate.output report \
--data.labels.label_columns location
  esmeray classify evaluate runs/locations --evaluate.input table.csv --evaluate.part test --evaluate.baselines true
"""

from pathlib import Path

from esmeray.common.errors import expanded
from esmeray.common.text import counted
from esmeray.dataset.section import Part
from esmeray.inference.classify.calls import EVALUATED_BY, ClassifyEvaluateSection
from esmeray.inference.classify.calls import evaluate as evaluate_classifier
from esmeray.tools.grammar import ModelPath, OutputWriter, command
from esmeray.train_config.section import Overrides


@command("classify evaluate", __doc__, made_by=EVALUATED_BY)
def main(model: ModelPath, evaluate: ClassifyEvaluateSection, writer: OutputWriter, overrides: Overrides) -> None:
    output = evaluate.output or _output(model, evaluate, evaluate.own_part())
    settings = {**dict(evaluate), "output": output}
    config = {".".join(key): value for key, value in overrides.items()}
    evaluation = evaluate_classifier(model, **settings, config=config, overwrite=writer.overwrite)
    from esmeray.inference.calibration import HELD_OUT  # here: both load torch
    from esmeray.inference.classify.report import metrics_lines

    print("\n".join(metrics_lines(evaluation.content, evaluation.best_of)))
    if evaluate.calibrate and evaluate.input is None:
        print(HELD_OUT)
    if not evaluation.training_known:
        print("  unknown whether the model was trained on these records: the data of its run are not available")
    for name, number in evaluation.counts.items():
        print(f"  {counted(number, name.replace('_', ' ').replace('records ', 'record{s} '))}")
    print(f"written: {output}/report.md and evaluation.json")


def _output(model: Path, evaluate: ClassifyEvaluateSection, part: Part) -> Path:
    """Default folder of the report: in the folder of the model's run, otherwise in the current folder."""
    name: str = part
    if evaluate.input is not None:
        stem = Path(evaluate.input).resolve().name.split(".")[0]
        name = stem if part == "all" else f"{stem}-{part}"
    folder = expanded(model).absolute()
    # The model may be a run, or an export in the folder of a run.
    run = next((path for path in (folder, folder.parent) if (path / "metrics.jsonl").is_file()), None)
    return Path(f"evaluation-{name}") if run is None else run / "evaluations" / name
