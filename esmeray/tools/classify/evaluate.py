"""Score a trained classifier on a labelled file, or on what its run held out.

Reads the file with the settings of the run (where labels stand, what to do without one), predicts, and writes a
folder: report.md to read, evaluation.json with all metrics and their bootstrap intervals, and pictures of confusion,
ranking and calibration: evaluations/INPUT in the folder of the run, or evaluation-INPUT here for a model without a run.
Options such as --data.labels.label_columns class override the settings of the run. Of a file it says how many records
the model was trained on, by their sequences, and has the metrics of all and of the others; of a model whose run is not
here that is not known. Without a file the records are those that the run held out, whatever its split.

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
from esmeray.tools.grammar import Made, OfModel, command
from esmeray.train_config.section import Overrides


@command("classify evaluate", __doc__, made_by=EVALUATED_BY)
def main(model: OfModel, evaluate: ClassifyEvaluateSection, made: Made, overrides: Overrides) -> None:
    output = evaluate.output or _output(model, evaluate, evaluate.own_part())
    settings = {**dict(evaluate), "output": output}
    config = {".".join(key): value for key, value in overrides.items()}
    evaluation = evaluate_classifier(model, **settings, config=config, overwrite=made.overwrite)
    from esmeray.inference.classify.report import metrics_lines  # here: it loads torch

    print("\n".join(metrics_lines(evaluation.content, evaluation.best_of)))
    if not evaluation.training_known:
        print("  whether the model was trained on these records is not known: its run's data are not here")
    for name, number in evaluation.counts.items():
        print(f"  {counted(number, name.replace('_', ' ').replace('records ', 'record{s} '))}")
    print(f"written: {output}/report.md and evaluation.json")


def _output(model: Path, evaluate: ClassifyEvaluateSection, part: Part) -> Path:
    """A folder in that of the run, where the model is of one; else here."""
    name: str = part
    if evaluate.input is not None:
        stem = Path(evaluate.input).resolve().name.split(".")[0]
        name = stem if part == "all" else f"{stem}-{part}"
    folder = expanded(model).absolute()
    # The model may be a run, or the export in it.
    run = next((path for path in (folder, folder.parent) if (path / "metrics.jsonl").is_file()), None)
    return Path(f"evaluation-{name}") if run is None else run / "evaluations" / name
