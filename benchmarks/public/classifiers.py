"""Locations of proteins (DeepLoc), intents of messages (Banking77) and secondary structure, by trained classifiers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work


def evaluated(work: Work, config: str, name: str, settings: str) -> dict[str, Value]:
    """Train a classifier; return its metrics, and its baselines' metrics as BASELINE: METRIC."""
    work.run(f"train --config train_config/{config}.yaml --run.name {name} {work.training} {settings}")
    options = "--evaluate.baselines true --evaluate.output FOLDER/report --overwrite"
    work.run(f"classify evaluate FOLDER/{name} {options}")
    evaluation = work.read("report/evaluation.json")
    values = dict(_values(evaluation, ""))
    for baseline, own in evaluation["baselines"].items():
        values |= dict(_values(own, f"{baseline}: "))
    return values


def _values(evaluation: dict, prefix: str) -> Iterator[tuple[str, Value]]:
    intervals = evaluation.get("intervals", {})
    for name, metric in evaluation["metrics"].items():
        if isinstance(metric, float):
            yield f"{prefix}{name}", Value(value=metric, interval=intervals.get(name))


def _locations(work: Work) -> dict[str, Value]:
    source = "--data.source DATA/deeploc_train.fasta.gz --data.labels.unseen_labels skip"
    labels = r"--data.labels.header_pattern '^\S+ (?P<label>\S+)-[MSU]\b' --data.labels.split files"
    files = "--data.labels.validation_source DATA/deeploc_valid.fasta.gz"
    training = "--training.epochs 8 --training.warmup_steps 50"
    return evaluated(work, "protein_classifier", "deeploc", f"{source} {labels} {files} {training}")


def _intents(work: Work) -> dict[str, Value]:
    training = "--training.epochs 30 --training.evaluate_every_steps 100 --training.warmup_steps 50"
    # Always from random weights: a model of proteins knows nothing about messages.
    own = replace(work, weights=None)
    return evaluated(own, "text_classifier", "banking77", f"--data.source DATA/banking77_train.csv {training}")


def _structure(work: Work) -> dict[str, Value]:
    write_residues(work.data / "residue" / "secondary_structure.csv.gz", work.folder / "residues.csv")
    labels = "--data.labels.kind per_residue --data.labels.label_columns structure --data.labels.id_column id"
    split = "--data.labels.split column --data.labels.split_column split"
    training = "--model.classifier.pooling mean --model.classifier.dropout 0.1 --training.epochs 3"
    settings = f"--data.source FOLDER/residues.csv {labels} {split} {training} --training.evaluate_every_steps 200"
    return evaluated(work, "protein_classifier", "structure", settings)


def write_residues(source: Path, target: Path) -> None:
    """Write the table with '.' for the structure of unresolved residues, which are neither learned nor scored."""
    # Read as text: NA may be a protein, and 0101 is no number.
    table = pd.read_csv(source, dtype=str, keep_default_na=False)

    def known(row: pd.Series) -> str:
        return "".join(np.where(np.array([*row["resolved"]]) == "0", ".", [*row["structure"]]))

    table["structure"] = table.apply(known, axis=1)
    table[["id", "sequence", "structure", "split"]].to_csv(target, index=False)


BENCHMARKS = (
    PublicBenchmark(
        name="secondary_structure",
        title="Secondary structure, three states",
        about={
            "data": "NetSurfP-2.0 by FLIP (J-SNACKKB/FLIP, AFL-3.0): proteins with H, E or C for each residue",
            "split": "train 9,712, validation 1,080 proteins; unresolved residues are left out",
            "plain baseline": "the commonest class of the residue's amino acid",
            "published values": "Rao et al. 2019 (TAPE), CB513",
            "not comparable": "published values are of CB513, without evolutionary profiles; ours of the "
            "validation part",
        },
        metrics=(
            Metric(
                "accuracy",
                "accuracy of residues",
                "class of the residue: accuracy",
                {"one-hot": 0.69, "LSTM, ResNet": 0.75},
            ),
        ),
        measure=_structure,
    ),
    PublicBenchmark(
        name="deeploc",
        title="Locations in the cell",
        about={
            "data": "DeepLoc's proteins with ten locations (HannesStark/protein-localization, MIT)",
            "split": "train: the file of DeepLoc's test set, 2,768; validation: Stärk's own, 1,678",
            "plain baseline": "logistic regression on the composition",
            "published values": "HannesStark/protein-localization, DeepLoc's test set",
            "not comparable": "published values are of models trained on four times as many proteins, and of DeepLoc's "
            "test set, which ours are trained on here; the best checkpoint is chosen on the validation part",
        },
        metrics=(
            Metric(
                "accuracy",
                "accuracy of proteins",
                "logistic regression on composition: accuracy",
                {"iLoc-Euk": 0.682, "DeepLoc": 0.780, "light attention on embeddings": 0.806},
            ),
        ),
        measure=_locations,
    ),
    PublicBenchmark(
        name="banking77",
        title="Intents of customers' messages",
        about={
            "data": "Banking77's training part (PolyAI-LDN/task-specific-datasets, CC BY 4.0): 10,003 messages, 77 "
            "intents",
            "split": "a tenth of each intent held out, by a hash of the message",
            "plain baseline": "logistic regression on TF-IDF",
            "published values": "Casanueva et al. 2020, the test part; quoted without the paper, which was not at hand",
            "not comparable": "published values are of pretrained encoders and of the test part, which is not here",
        },
        metrics=(
            Metric(
                "accuracy",
                "accuracy of messages",
                "logistic regression on TF-IDF: accuracy",
                {"BERT": 0.937, "USE": 0.928},
            ),
        ),
        measure=_intents,
    ),
)
