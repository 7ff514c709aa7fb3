"""Evaluating predicted terms of proteins with intervals, compared with cafaeval 1.3, which computes none.

Both are programs that read the same files and write results to disk, with the same settings: precision and recall at 99
thresholds, with and without information accretion. The files are generated: an ontology of 25,000 terms with about 35
ancestors each, 8,000 annotated proteins, 200 predicted terms each. cafaeval gets one thread, since each thread holds
four matrices of proteins by terms. Each program runs once; the curves of both must agree.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.harness.comparison import compare_runs
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from benchmarks.programs.processes import programs

OURS, PEER = "function evaluate, 1,000 draws", "cafaeval"
COMMANDS = {
    OURS: "esmeray.tools function evaluate {0}/predictions/some.tsv --evaluate.truth {0}/truth.tsv "
    "--evaluate.ontology {0}/terms.obo --evaluate.ia {0}/accretion.tsv --evaluate.output {0}/ours",
    PEER: "cafaeval {0}/terms.obo {0}/predictions {0}/truth.tsv -ia {0}/accretion.tsv -out_dir {0}/peer -threads 1",
}
PROTEINS, TERMS, PREDICTED, ANNOTATED = 8000, 25_000, 200, 5
TOLERANCE = 6e-4
"""cafaeval writes three digits."""


def _rows(setting: Setting) -> Iterator[Row]:
    proteins, terms = (200, 1000) if setting.quick else (PROTEINS, TERMS)
    folder = setting.folder
    write_files(folder, proteins, terms)
    setting.facts.update({"proteins": proteins, "terms": terms, "predictions": proteins * PREDICTED})
    options = {"floors": {PEER: 20.0}, "better": "lower", "rounds": 1}
    rows = [*compare_runs(setting, "evaluation of functions", "s", programs(COMMANDS, folder), **options)]
    require_agreement(folder)
    yield from rows


def write_files(folder: Path, proteins: int, terms: int) -> None:
    """Write a random ontology, annotations, predictions and weights of terms."""
    random = np.random.default_rng(0)
    names = np.array([f"GO:{number:07d}" for number in range(terms)])
    with (folder / "terms.obo").open("w") as file:
        for number, name in enumerate(names):
            file.write(f"[Term]\nid: {name}\nname: {number}\nnamespace: biological_process\n")
            # Parents are earlier terms, so that the graph has no cycle.
            parents = random.integers(number, size=1 + (random.random() < 0.3)) if number else ()
            file.writelines(f"is_a: {names[parent]}\n" for parent in sorted(set(parents)))
            file.write("\n")
    (folder / "accretion.tsv").write_text("".join(f"{name}\t{random.exponential(2.0):.4f}\n" for name in names))
    (folder / "predictions").mkdir()
    with (folder / "truth.tsv").open("w") as truth, (folder / "predictions" / "some.tsv").open("w") as predictions:
        for protein in range(proteins):
            chosen = names[random.choice(terms, PREDICTED + ANNOTATED, replace=False)]
            truth.writelines(f"P{protein}\t{name}\n" for name in chosen[:ANNOTATED])
            predicted = chosen[ANNOTATED - 2 : -2]  # two annotated terms are among them
            scores = random.random(PREDICTED)
            pairs = zip(predicted, scores, strict=True)
            predictions.writelines(f"P{protein}\t{name}\t{score:.3f}\n" for name, score in pairs)


def require_agreement(folder: Path) -> None:
    """Raise WrongWorkError if the curves differ by more than cafaeval's digits."""
    ours = pd.read_csv(folder / "ours" / "curves.tsv", sep="\t").drop(columns="ns")
    peer = pd.read_csv(folder / "peer" / "evaluation_all.tsv", sep="\t").drop(columns="ns")
    largest = float((ours - peer[ours.columns]).abs().max(axis=None, skipna=False))
    if not largest <= TOLERANCE:  # also if one has a row more, which is NaN
        raise WrongWorkError(f"curves differ by {largest:g}")


STAGE = Stage(
    name="function_evaluation",
    summary="predicted terms of proteins evaluated with intervals, compared with cafaeval: time and peak memory",
    rows=_rows,
    packages=("cafaeval",),
    distributions=("cafaeval", "scipy"),
)
