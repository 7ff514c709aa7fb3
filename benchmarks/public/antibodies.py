"""AntiBERTy's trained weights, next to random weights of its architecture: continued training, and a classifier."""

from dataclasses import replace
from importlib.metadata import distribution
from math import log
from pathlib import Path

import pandas as pd

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work
from benchmarks.public.classifiers import evaluated
from esmeray.run_folder.metrics_log import read_metrics

MODEL = "FOLDER/antiberty/AntiBERTy_md_smooth"
RANDOM = "bert --model.backbone.layers 8 --model.backbone.hidden_size 512 --model.backbone.heads 8"
"""Backbone with random weights of AntiBERTy's architecture."""
_TRAININGS = {
    "AntiBERTy: full": f"--training.learning_rate 1e-4 --model.backbone.source {MODEL}",
    "AntiBERTy: LoRA": f"--training.learning_rate 1e-3 --model.backbone.source {MODEL} --model.backbone.lora.rank 8",
    "AntiBERTy: frozen": f"--training.learning_rate 1e-3 --model.backbone.source {MODEL} --model.backbone.frozen true",
    "random: full": f"--training.learning_rate 1e-4 --model.backbone.source {RANDOM}",
    "random: LoRA": f"--training.learning_rate 1e-3 --model.backbone.source {RANDOM} --model.backbone.lora.rank 8",
    "random: frozen": f"--training.learning_rate 1e-3 --model.backbone.source {RANDOM} --model.backbone.frozen true",
}
_WEIGHTS = "AntiBERTy (PyPI: antiberty 0.1.3, MIT): 26 million parameters, trained on 558 million antibodies"


def _bits(work: Work) -> dict[str, Value]:
    _link_weights(work.folder / "antiberty")
    table = pd.read_csv(work.data / "antibodies" / "shehata.csv", dtype=str, keep_default_na=False)
    chains = enumerate([*table["heavy_seq"], *table["light_seq"]])
    (work.folder / "antibodies.fasta").write_text("".join(f">{number}\n{chain}\n" for number, chain in chains))
    data = "--data.source FOLDER/antibodies.fasta --data.validation_share 0.2 --batch.global_tokens 4096"
    optimizer = "--training.optimizer adamw --training.max_steps 30 --training.warmup_steps 5"
    values: dict[str, Value] = {}
    for name, settings in _TRAININGS.items():
        weights, _, way = name.partition(": ")
        run = f"--run.name {weights}-{way} --run.storage_path FOLDER --run.seed {work.seed}"
        work.run(f"train --config train_config/masked_lm.yaml {run} {data} {optimizer} {settings}")
        records = read_metrics(work.folder / f"{weights}-{way}" / "metrics.jsonl")
        first, *_, last = [record["loss"] / log(2) for record in records if record["kind"] == "validation"]
        values |= {f"{weights}: before": Value(value=first), name: Value(value=last)}
    return values


def _species(work: Work) -> dict[str, Value]:
    _link_weights(work.folder / "antiberty")
    head = "--model.classifier.pooling mean --model.classifier.head linear --model.classifier.dropout 0.1"
    training = "--training.epochs 20 --training.warmup_steps 20"
    settings = f"--data.source DATA/antibodies/species_chain.csv {head} {training}"
    values = evaluated(replace(work, weights=MODEL), "protein_classifier", "trained", settings)
    random = f"{settings} --model.backbone.source {RANDOM} --model.backbone.frozen true"
    from_random = evaluated(replace(work, weights=None), "protein_classifier", "random", random)
    return values | {f"random weights: {name}": value for name, value in from_random.items()}


def _link_weights(link: Path) -> None:
    if not link.exists():  # a seed that was stopped has it
        link.symlink_to(str(distribution("antiberty").locate_file("antiberty/trained_models")))


_NOT_COMPARABLE = (
    "AntiBERTy was trained on 558 million antibodies of the Observed Antibody Space; near copies of these are likely "
    "among them, and relatives by germline are in both parts here"
)

BENCHMARKS = (
    PublicBenchmark(
        name="antibody_training",
        title="Antibodies: continued training",
        about={
            "weights": _WEIGHTS,
            "data": "heavy and light chains of 398 antibodies of human B cells (Shehata et al. 2019; "
            "The-Obstacle-Is-The-Way/antibody_training_pipeline_ESM, Apache-2.0)",
            "split": "a fifth of the distinct chains held out, by a hash; 15 % of their residues are predicted",
            "plain baseline": "the same training from random weights",
            "training": "30 steps of 4,096 tokens with AdamW, learning rate 1e-4 in full, otherwise 1e-3. LoRA has "
            "rank 8 on the attention's projections; frozen trains the head alone",
            "not comparable": _NOT_COMPARABLE,
        },
        metrics=(
            Metric("AntiBERTy: before", "bits per residue, AntiBERTy before training", "random: before"),
            Metric("AntiBERTy: full", "bits per residue, AntiBERTy after full training", "random: full"),
            Metric("AntiBERTy: LoRA", "bits per residue, AntiBERTy after training by LoRA", "random: LoRA"),
            Metric("AntiBERTy: frozen", "bits per residue, AntiBERTy after training its head alone", "random: frozen"),
        ),
        measure=_bits,
    ),
    PublicBenchmark(
        name="antibody_species",
        title="Antibodies: species and chain",
        about={
            "weights": _WEIGHTS,
            "data": "1,618 chains of four classes, human or mouse, heavy or light (ctboughter/AIMS, MIT)",
            "split": "a fifth of each class held out, by a hash of the chain",
            "plain baseline": "logistic regression on composition",
            "training": "a linear head on the mean of a frozen backbone's features",
            "not comparable": _NOT_COMPARABLE,
        },
        metrics=(
            Metric("accuracy", "accuracy of chains, AntiBERTy", "logistic regression on composition: accuracy"),
            Metric(
                "random weights: accuracy",
                "accuracy of chains, random weights",
                "logistic regression on composition: accuracy",
            ),
        ),
        measure=_species,
    ),
)
