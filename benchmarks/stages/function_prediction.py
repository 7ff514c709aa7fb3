"""Functions predicted for CAFA2's targets: the ranker beside the blend, and the best of its parts.

Trained on experimentally annotated proteins whose local identity to every target is below a limit, evaluated on the
no-knowledge targets of each aspect with the defaults, roots left out and 1,500 terms a protein. A row is Fmax, or Fmax
weighted by the information accretion of the training annotations; facts have all parts and 95 % intervals. Embeddings
are the composition, so no trained model is needed. The files are those of the development's data folder; without it
there is nothing to measure.
"""

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from esmeray.benchmarks.harness.proteins import DEVELOPMENT_DATA
from esmeray.benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from esmeray.dataset.section import IngestSection
from esmeray.function.annotations import information_accretion, read_annotations, read_scores
from esmeray.function.evaluation import evaluate_functions
from esmeray.function.ontology import read_ontology
from esmeray.function.section import EvaluationSection, PredictTermsSection
from esmeray.inference.function.prediction import predict
from esmeray.tools.train._experiment import trained

ASPECTS = {"MF": "mfo", "BP": "bpo", "CC": "cco"}
RANKER, BLEND, BEST = "ranker", "blend", "best of its parts"
PARTS = ("naive", "homology", "neighbours", "network")
LIMITS = (0.9, 0.3)
METRICS = {"fmax": "Fmax", "fmax_w": "weighted Fmax"}


def _title(aspect: str, metric: str, limit: float) -> str:
    return f"{METRICS[metric]} of {aspect}, identity below {limit}"


def _cases(setting: Setting) -> Iterator[Case]:
    data = DEVELOPMENT_DATA / "go"
    if not data.is_dir():
        setting.note(f"{data}: is not there")
        return
    for limit in LIMITS:
        folder = setting.folder / str(limit)
        write_files(data, folder, limit, 60 if setting.quick else 1)
        metrics = _measured(data, folder, setting)
        for aspect in ASPECTS:
            for metric in METRICS:
                values = {name: metrics[name][aspect][metric] for name in (RANKER, BLEND, *PARTS)}
                facts: Facts = {
                    name: f"{value:.3f} ({low:.3f} to {high:.3f})" for name, (value, (low, high)) in values.items()
                }
                compared = {name: values[name][0] for name in (RANKER, BLEND)}
                compared[BEST] = max(values[name][0] for name in PARTS)
                ways = tuple(Contender(name, partial(float, value), "value") for name, value in compared.items())
                yield Case(_title(aspect, metric, limit), "value", ways, rounds=1, facts=facts)


def write_files(data: Path, folder: Path, limit: float, every: int = 1) -> None:
    """FASTA of both, annotations of the training proteins, and for each aspect those of its targets."""
    folder.mkdir()
    rows = {name: _rows(data / f"{name}.jsonl.gz")[::every] for name in ("training_pool", "cafa2_targets")}
    # By identity to any target, so that no part can look a target's relatives up.
    pool = [(f"P{n}", row) for n, row in enumerate(rows["training_pool"]) if row["max_id_cafa2"] < limit]
    targets = [(row["id"], row) for row in rows["cafa2_targets"]]
    for name, proteins in (("train", pool), ("targets", targets)):
        (folder / f"{name}.fasta").write_text("".join(f">{protein}\n{row['seq']}\n" for protein, row in proteins))
    files = {"train": [(protein, row, aspect) for protein, row in pool for aspect in ASPECTS]}
    for aspect, code in ASPECTS.items():
        files[aspect] = [(protein, row, aspect) for protein, row in targets if f"{code}_all_type1" in row["lists"]]
    for name, annotated in files.items():
        lines = [f"{protein}\t{term}\n" for protein, row, aspect in annotated for term in row[aspect]]
        (folder / f"{name}.tsv").write_text("".join(lines))


def _rows(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def _measured(data: Path, folder: Path, setting: Setting) -> dict[str, dict[str, dict]]:
    """Value and interval by part, aspect and metric."""
    obo = data / "go_2013-06.obo.gz"
    setting.note("training")
    proteins = (folder / "train.fasta").read_text().count(">")
    # The recipe as it is shipped, with the paths of this folder.
    code, _ = trained(
        "train_config/function.yaml",
        {
            ("run", "storage_path"): str(folder),
            ("data", "source"): [str(folder / "train.fasta")],
            ("data", "terms", "annotations"): str(folder / "train.tsv"),
            ("data", "terms", "ontology"): str(obo),
            ("training", "evaluate_every_steps"): max(1, proteins // 128),  # an epoch
            ("wandb", "mode"): "disabled",
        },
    )
    if code:
        raise WrongWorkError("training did not end")
    ontology = read_ontology(obo)
    known = read_annotations(folder / "train.tsv", ontology)
    truths = {aspect: read_annotations(folder / f"{aspect}.tsv", ontology).popitem() for aspect in ASPECTS}
    targets = {name: truth.proteins for name, truth in truths.values()}
    # Of the training annotations: those of the targets are what is to be predicted.
    accretion = {name: information_accretion(known[name], ontology.aspects[name]) for name in targets}
    metrics: dict[str, dict[str, dict]] = {}
    for part in (RANKER, BLEND, *PARTS):
        setting.note(f"predicting and evaluating {part}")
        output = folder / f"{part}.tsv"
        options = PredictTermsSection.model_validate(
            {"input": [str(folder / "targets.fasta")], "output": output, "terms": 1500, "part": part}
        )
        predict(folder / "function", options, IngestSection(), overwrite=True)
        scores = read_scores(output, ontology, targets, unknown="ignore")
        metrics[part] = {}
        for aspect, (name, truth) in truths.items():
            evaluated = evaluate_functions(
                ontology.aspects[name],
                truth,
                scores[name],
                accretion_V=accretion[name],
                settings=EvaluationSection(orphans=False),  # without the roots, which every protein has
            ).metrics
            metrics[part][aspect] = {name: (evaluated[name].value, evaluated[name].interval) for name in METRICS}
    return metrics


STAGE = Stage(
    name="function_prediction",
    summary="functions of CAFA2's targets: the ranker beside the blend, and the best of its parts",
    cases=_cases,
    comparisons=tuple(
        Comparison(_title(aspect, metric, limit), RANKER, BEST, {"cpu": 1.0})
        for limit in LIMITS
        for metric in METRICS
        for aspect in ASPECTS
    ),
)
