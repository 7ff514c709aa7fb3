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
from esmeray.inference.models.source import config_of, label_space_of
from esmeray.tools.classify.predict import ClassifierRunSection
from esmeray.tools.grammar import Made, OfModel, Overrides, command


class ClassifyEvaluateSection(ClassifierRunSection):
    """Records, report, and how the classifier runs."""

    input: str | None = None
    """Labelled file, folder or quoted glob, or a URI. Default: the run's own records."""
    output: Path | None = None
    """Folder of the report. Default: RUN/evaluations/INPUT-PART, or evaluation-INPUT-PART."""
    part: Part | None = None
    """Records of the input by the split column of the run's settings, all by default; or of the run's own by its split,
    those held out for validation by default."""
    baselines: bool = False
    """Fit simple baselines on what the run was trained on and show their metrics beside."""


@command("classify evaluate", __doc__, made_by="evaluate")
def main(model: OfModel, evaluate: ClassifyEvaluateSection, made: Made, overrides: Overrides) -> None:
    # What is wrong with the model's folder, the settings or the data is reported before torch is loaded.
    from esmeray.inference.classify.labelled import in_training, own_texts, read_texts, without_texts

    space = label_space_of(model)
    # Options on the command line are for the file: records of the run are found by the settings that it had.
    recorded, config = config_of(model), config_of(model, overrides)
    part = evaluate.part or ("all" if evaluate.input else "validation")
    output = evaluate.output or _output(model, evaluate, part)
    made.refuse_existing(output)
    trained_N = None  # as long as it is not known
    if evaluate.input is None:
        texts = own_texts(recorded.run, recorded.data, recorded.model.tokenizer, space, part)
    else:
        texts = read_texts([evaluate.input], config.data, config.model.tokenizer, space, part, overrides)
        trained_N = in_training(recorded.run, recorded.data, texts.texts)
    training = None
    if evaluate.baselines:
        known = own_texts(recorded.run, recorded.data, recorded.model.tokenizer, space, "training")
        # A baseline that was fitted to what it is evaluated on would look better than it is.
        training = without_texts(known, set(texts.texts))
    from esmeray.inference.classifier import ClassifierPipeline  # here: it loads torch

    pipeline = ClassifierPipeline.load(
        model, data=config.data, **evaluate.model_dump(include={*ClassifierRunSection.model_fields})
    )
    from esmeray.inference.classify.report import evaluation_of, metrics_lines, scored_by, write_report

    with made.folder(output) as building:
        scored, baselines, counts = scored_by(pipeline, config.model.tokenizer, texts, training)
        classifier = config.model.classifier
        evaluation = evaluation_of(
            scored, baselines, trained_N=trained_N, samples=classifier.bootstrap, seed=config.run.seed
        )
        facts = {
            "model": str(model),
            "data": evaluate.input or f"the run's own ({', '.join(config.data.source)})",
            "part": part,
            # In the report: who reads it later does not see what was printed.
            **({"trained on its records": "not known"} if evaluate.input and trained_N is None else {}),
            "device": str(pipeline.model.device),
            "precision": pipeline.model.facts.precision,
        }
        best_of = None if classifier.best_metric == "auto" else classifier.best_metric
        write_report(building, scored, evaluation, best_of=best_of, counts=counts, facts=facts)
    print("\n".join(metrics_lines(evaluation, best_of)))
    if evaluate.input and trained_N is None:
        print("  whether the model was trained on these records is not known: its run's data are not here")
    for name, number in counts.items():
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
