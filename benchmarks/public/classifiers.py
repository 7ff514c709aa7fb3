"""Locations of proteins (DeepLoc), intents of messages (Banking77) and secondary structure, by trained classifiers."""

from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work


def _evaluated(work: Work, config: str, *settings: object, name: str, weights: bool = True) -> dict[str, Value]:
    """Metrics of the classifier that the settings train, and those of its baselines as BASELINE: METRIC."""
    run = work.folder / name
    run_options = ["--run.name", name, "--run.storage_path", work.folder, "--run.seed", work.seed]
    backbone = work.backbone if weights else []
    work.run("train", "--config", f"train_config/{config}.yaml", *run_options, *settings, *backbone)
    report = work.folder / "report"
    work.run("classify", "evaluate", run, "--evaluate.baselines", "true", "--evaluate.output", report, "--overwrite")
    evaluation = work.read("report/evaluation.json")
    values = {key: Value(value=value, interval=evaluation["intervals"].get(key)) for key, value in _of(evaluation)}
    for baseline, metrics in evaluation["baselines"].items():
        values |= {f"{baseline}: {key}": Value(value=value) for key, value in _of(metrics)}
    return values


def _of(evaluation: dict) -> list[tuple[str, float]]:
    return [(key, value) for key, value in evaluation["metrics"].items() if isinstance(value, float)]


def _locations(work: Work) -> dict[str, Value]:
    labels = ["--data.labels.header_pattern", r"^\S+ (?P<label>\S+)-[MSU]\b", "--data.labels.split", "files"]
    files = ["--data.labels.validation_source", work.data / "deeploc_valid.fasta.gz"]
    training = ["--training.epochs", 8, "--training.warmup_steps", 50]
    source = ["--data.source", work.data / "deeploc_train.fasta.gz", "--data.labels.unseen_labels", "skip"]
    return _evaluated(work, "protein_classifier", *source, *labels, *files, *training, name="deeploc")


def _intents(work: Work) -> dict[str, Value]:
    training = ["--training.epochs", 30, "--training.evaluate_every_steps", 100, "--training.warmup_steps", 50]
    source = ["--data.source", work.data / "banking77_train.csv"]
    # A model of proteins knows nothing of messages.
    return _evaluated(work, "text_classifier", *source, *training, name="banking77", weights=False)


def _structure(work: Work) -> dict[str, Value]:
    table = work.folder / "residues.csv"
    write_residues(work.data / "residue" / "secondary_structure.csv.gz", table)
    columns = ["--data.labels.label_columns", "structure", "--data.labels.id_column", "id"]
    labels = ["--data.labels.kind", "per_residue", "--data.labels.split", "column"]
    split = ["--data.labels.split_column", "split"]
    model = ["--model.classifier.pooling", "mean", "--model.classifier.dropout", 0.1]
    training = ["--training.epochs", 3, "--training.evaluate_every_steps", 200]
    settings = [*columns, *labels, *split, *model, *training]
    return _evaluated(work, "protein_classifier", "--data.source", table, *settings, name="structure")


def write_residues(source: Path, target: Path) -> None:
    """The table with '.' for the structure of residues that were not resolved, which are neither learnt nor scored."""
    # As text: NA may be a protein, and 0101 is no number.
    table = pd.read_csv(source, dtype=str, keep_default_na=False)

    def known(row: pd.Series) -> str:
        return "".join(np.where(np.array([*row["resolved"]]) == "0", ".", [*row["structure"]]))

    table["structure"] = table.apply(known, axis=1)
    table[["id", "sequence", "structure", "split"]].to_csv(target, index=False)


LINEAR = "logistic regression on "

BENCHMARKS = (
    PublicBenchmark(
        name="secondary_structure",
        title="Secondary structure, three states",
        data="NetSurfP-2.0 by FLIP (J-SNACKKB/FLIP, AFL-3.0): proteins with H, E or C for each residue",
        split="train 9,712, validation 1,080 proteins; residues that were not resolved are left out",
        metrics=(
            Metric(
                "accuracy",
                "accuracy of residues",
                "class of the residue: accuracy",
                {"one-hot": 0.69, "LSTM, ResNet": 0.75},
            ),
        ),
        baseline="the commonest class of the residue's amino acid",
        source="Rao et al. 2019 (TAPE), CB513",
        differs="published values are of CB513, with evolutionary profiles left out; ours of the validation part",
        measure=_structure,
    ),
    PublicBenchmark(
        name="deeploc",
        title="Locations in the cell",
        data="DeepLoc's proteins with ten locations (HannesStark/protein-localization, MIT)",
        split="train: the file of DeepLoc's test set, 2,768; validation: Stärk's own, 1,678",
        metrics=(
            Metric(
                "accuracy",
                "accuracy of proteins",
                f"{LINEAR}composition: accuracy",
                {"iLoc-Euk": 0.682, "DeepLoc": 0.780, "light attention on embeddings": 0.806},
            ),
        ),
        baseline="logistic regression on the composition",
        source="HannesStark/protein-localization, of DeepLoc's test set",
        differs="published values are of models trained on four times as many proteins, and of DeepLoc's test set, "
        "which is what ours are trained on here; the best checkpoint is chosen on the validation part",
        measure=_locations,
    ),
    PublicBenchmark(
        name="banking77",
        title="Intents of customers' messages",
        data="Banking77's training part (PolyAI-LDN/task-specific-datasets, CC BY 4.0): 10,003 messages, 77 intents",
        split="a tenth of each intent held out, by a hash of the message",
        metrics=(
            Metric("accuracy", "accuracy of messages", f"{LINEAR}TF-IDF: accuracy", {"BERT": 0.937, "USE": 0.928}),
        ),
        baseline="logistic regression on TF-IDF",
        source="Casanueva et al. 2020, the test part; quoted without a look at the paper, which was not at hand",
        differs="published values are of pretrained encoders and of the test part, which is not here",
        measure=_intents,
    ),
)
