"""Functions of CAFA2's targets, by the ranker of the task terms, as CAFA evaluates them."""

from pathlib import Path

import pandas as pd

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work

ASPECTS = {"MF": "mfo", "BP": "bpo", "CC": "cco"}
IDENTITY = 0.9
"""Largest identity of a training protein to any target."""
_PUBLISHED = {
    "MF": {"fmax": {"naive": 0.348, "BLAST": 0.451}},
    "BP": {"fmax": {"naive": 0.274}},
    "CC": {"fmax": {"naive": 0.445, "BLAST": 0.347}},
}


def _functions(work: Work) -> dict[str, Value]:
    files = work.folder / "files"
    ontology = work.data / "go" / "go_2013-06.obo.gz"
    if not files.exists():  # of a seed that was stopped
        write_files(work.data / "go", files, IDENTITY)
    proteins = (files / "train.fasta").read_text().count(">")
    run_options = ["--run.storage_path", work.folder, "--run.seed", work.seed]
    terms = ["--data.terms.annotations", files / "train.tsv", "--data.terms.ontology", ontology]
    # An epoch, as patience counts evaluations.
    epoch = ["--training.evaluate_every_steps", max(1, proteins // 128)]
    vectors = ["--model.terms.embeddings.model", work.weights] if work.weights else []
    source = ["--data.source", files / "train.fasta"]
    work.run("train", "--config", "train_config/function.yaml", *run_options, *source, *terms, *epoch, *vectors)
    values = {}
    for part, ending in (("ranker", ""), ("naive", ": naive")):
        predicted = work.folder / f"{part}.tsv"
        options = ["--predict.part", part, "--predict.terms", 1500, "--overwrite"]
        inputs = ["--predict.input", files / "targets.fasta", "--predict.output", predicted]
        work.run("function", "predict", work.folder / "function", *inputs, *options)
        for aspect in ASPECTS:
            report = work.folder / f"{part}-{aspect}"
            truth = ["--evaluate.truth", files / f"{aspect}.tsv", "--evaluate.ontology", ontology]
            # The files of targets have all of them: those without annotation in the aspect are no error here.
            rules = ["--evaluate.unknown", "ignore", "--evaluate.orphans", "false"]
            weighted = ["--evaluate.ia_from", files / "train.tsv", "--evaluate.output", report, "--overwrite"]
            work.run("function", "evaluate", predicted, *truth, *rules, *weighted)
            (evaluated,) = work.read(f"{report.name}/evaluation.json")["aspects"].values()
            for name in ("fmax", "fmax_w"):
                values[f"{name} {aspect}{ending}"] = Value.model_validate(evaluated["metrics"][name])
    return values


def write_files(data: Path, folder: Path, limit: float) -> None:
    """FASTA of both, annotations of the training proteins, and for each aspect those of its targets."""
    folder.mkdir()
    parts = (data / "training_pool.jsonl.gz", data / "cafa2_targets.jsonl.gz")
    candidates, asked = (pd.read_json(path, lines=True, dtype=False).to_dict("records") for path in parts)
    # By identity to any target, so that no part can look a target's relatives up.
    pool = [(f"P{n}", row) for n, row in enumerate(candidates) if row["max_id_cafa2"] < limit]
    targets = [(row["id"], row) for row in asked]
    for name, proteins in (("train", pool), ("targets", targets)):
        (folder / f"{name}.fasta").write_text("".join(f">{protein}\n{row['seq']}\n" for protein, row in proteins))
    files = {"train": [(protein, row, aspect) for protein, row in pool for aspect in ASPECTS]}
    for aspect, code in ASPECTS.items():
        files[aspect] = [(protein, row, aspect) for protein, row in targets if f"{code}_all_type1" in row["lists"]]
    for name, annotated in files.items():
        lines = [f"{protein}\t{term}\n" for protein, row, aspect in annotated for term in row[aspect]]
        (folder / f"{name}.tsv").write_text("".join(lines))


BENCHMARKS = (
    PublicBenchmark(
        name="cafa2",
        title="Functions: CAFA2",
        data="experimentally annotated proteins (Shen-Lab/TALE, MIT, cansyl/DEEPred, GPL-3, and others; UniProt CC BY "
        "4.0), CAFA2's targets (yuxjiang/CAFA2, MIT), Gene Ontology of 2013-06 (CC BY 4.0)",
        split=f"proteins whose identity to every target is below {IDENTITY}; no-knowledge targets (MF 421, BP 705, CC "
        "935), without roots",
        metrics=tuple(
            Metric(f"{name} {aspect}", f"{title}, {aspect}", f"{name} {aspect}: naive", published.get(name, {}))
            for aspect, published in _PUBLISHED.items()
            for name, title in (("fmax", "Fmax"), ("fmax_w", "weighted Fmax"))
        ),
        baseline="naive: share of the training proteins that have the term",
        source="CAFA2's own baselines, computed on these files",
        differs="training annotations are younger than CAFA2 and kept from the targets by identity, not by date",
        measure=_functions,
    ),
)
