"""Functions of CAFA2's targets, by the ranker of the task terms, evaluated as CAFA does."""

from pathlib import Path

import pandas as pd

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work

ASPECTS = {"MF": "mfo", "BP": "bpo", "CC": "cco"}
IDENTITY = 0.9
"""Maximum identity of a training protein with any target."""
_PUBLISHED = {
    "MF": {"fmax": {"naive": 0.348, "BLAST": 0.451}},
    "BP": {"fmax": {"naive": 0.274}},
    "CC": {"fmax": {"naive": 0.445, "BLAST": 0.347}},
}


def _functions(work: Work) -> dict[str, Value]:
    files = work.folder / "files"
    if not files.exists():  # a seed that was stopped has them
        write_files(work.data / "go", files, IDENTITY)
    proteins = (files / "train.fasta").read_text().count(">")
    ontology = "DATA/go/go_2013-06.obo.gz"
    source = f"--data.source FOLDER/files/train.fasta --run.storage_path FOLDER --run.seed {work.seed}"
    terms = f"--data.terms.annotations FOLDER/files/train.tsv --data.terms.ontology {ontology}"
    # Evaluated once an epoch, since patience counts evaluations.
    epoch = f"--training.evaluate_every_steps {max(1, proteins // 128)}"
    vectors = f"--model.terms.embeddings.model {work.weights}" if work.weights else ""
    work.run(f"train --config train_config/function.yaml {source} {terms} {epoch} {vectors}")
    values = {}
    for part, ending in (("ranker", ""), ("naive", ": naive")):
        inputs = f"--predict.input FOLDER/files/targets.fasta --predict.output FOLDER/{part}.tsv"
        work.run(f"function predict FOLDER/function {inputs} --predict.part {part} --predict.terms 1500 --overwrite")
        for aspect in ASPECTS:
            truth = f"--evaluate.truth FOLDER/files/{aspect}.tsv --evaluate.ontology {ontology}"
            # Targets without annotation in the aspect are no error here.
            rules = "--evaluate.unknown ignore --evaluate.orphans false --evaluate.ia_from FOLDER/files/train.tsv"
            output = f"--evaluate.output FOLDER/{part}-{aspect} --overwrite"
            work.run(f"function evaluate FOLDER/{part}.tsv {truth} {rules} {output}")
            (evaluated,) = work.read(f"{part}-{aspect}/evaluation.json")["aspects"].values()
            for name in ("fmax", "fmax_w"):
                values[f"{name} {aspect}{ending}"] = Value.model_validate(evaluated["metrics"][name])
    return values


def write_files(data: Path, folder: Path, limit: float) -> None:
    """Write FASTA of both parts, annotations of the training proteins, and of the targets per aspect."""
    folder.mkdir()
    candidates = pd.read_json(data / "training_pool.jsonl.gz", lines=True, dtype=False).to_dict("records")
    targets = pd.read_json(data / "cafa2_targets.jsonl.gz", lines=True, dtype=False).to_dict("records")
    # Far from every target, so that no part can look up a target's relatives.
    pool = [{**row, "id": f"P{number}"} for number, row in enumerate(candidates) if row["max_id_cafa2"] < limit]
    for name, proteins in (("train", pool), ("targets", targets)):
        (folder / f"{name}.fasta").write_text("".join(f">{row['id']}\n{row['seq']}\n" for row in proteins))
    lines = [f"{row['id']}\t{term}\n" for row in pool for aspect in ASPECTS for term in row[aspect]]
    (folder / "train.tsv").write_text("".join(lines))
    for aspect, code in ASPECTS.items():
        annotated = [row for row in targets if f"{code}_all_type1" in row["lists"]]
        lines = [f"{row['id']}\t{term}\n" for row in annotated for term in row[aspect]]
        (folder / f"{aspect}.tsv").write_text("".join(lines))


BENCHMARKS = (
    PublicBenchmark(
        name="cafa2",
        title="Functions: CAFA2",
        about={
            "data": "experimentally annotated proteins (Shen-Lab/TALE, MIT, cansyl/DEEPred, GPL-3, and others; UniProt "
            "CC BY 4.0), CAFA2's targets (yuxjiang/CAFA2, MIT), Gene Ontology of 2013-06 (CC BY 4.0)",
            "split": f"proteins whose identity with every target is below {IDENTITY}; no-knowledge targets (MF 421, BP "
            "705, CC 935), without roots",
            "plain baseline": "naive: fraction of the training proteins that have the term",
            "published values": "CAFA2's own baselines, computed on these files",
            "not comparable": "training annotations are younger than CAFA2, and separated from the targets by "
            "identity, not by date",
        },
        metrics=tuple(
            Metric(f"{name} {aspect}", f"{title}, {aspect}", f"{name} {aspect}: naive", published.get(name, {}))
            for aspect, published in _PUBLISHED.items()
            for name, title in (("fmax", "Fmax"), ("fmax_w", "weighted Fmax"))
        ),
        measure=_functions,
    ),
)
