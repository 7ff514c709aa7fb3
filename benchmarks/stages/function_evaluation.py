"""Evaluating predicted terms of proteins with intervals, beside cafaeval 1.3, which gives none.

Both are programs, from the same files to results on disk, by the same settings: precision and recall at 99 thresholds,
with and without information accretion. The files are generated: an ontology of 25,000 terms with about 35 ancestors
each, 8,000 annotated proteins, 200 predicted terms each. cafaeval has one thread, since each takes four matrices of
proteins by terms. A program runs once; its curves are held to the other's, and its peak of resident memory is the
second case.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.programs.processes import call

TIME, MEMORY = "evaluation of functions", "peak memory of evaluating functions"
OURS, PEER = "evaluate_function, 1,000 draws", "cafaeval"
PROTEINS, TERMS, PREDICTED, ANNOTATED = 8000, 25_000, 200, 5
TOLERANCE = 6e-4
"""cafaeval writes three digits."""


def _cases(setting: Setting) -> Iterator[Case]:
    proteins, terms = (200, 1000) if setting.quick else (PROTEINS, TERMS)
    folder = setting.folder
    write_files(folder, proteins, terms)
    commands = {
        OURS: "tools function evaluate {0}/predictions/some.tsv --evaluate.truth {0}/truth.tsv "
        "--evaluate.ontology {0}/terms.obo --evaluate.ia {0}/accretion.tsv --evaluate.output {0}/ours",
        PEER: "cafaeval {0}/terms.obo {0}/predictions {0}/truth.tsv -ia {0}/accretion.tsv -out_dir {0}/peer -threads 1",
    }

    # One run gives a program's time and its memory, which are two cases.
    @cache
    def measured(name: str) -> tuple[float, float]:
        """Seconds and peak resident MB of a program."""
        # Split before the folder is put in, which may hold a blank.
        words = [word.format(folder) for word in commands[name].split()]
        seconds, peak_mb = call(f"{__name__}:run_measured", words=words)
        if (folder / "ours").exists() and (folder / "peer").exists():
            facts["largest difference of a curve"] = _difference(folder)
        return seconds, peak_mb

    def value(name: str, index: int) -> float:
        return measured(name)[index]

    facts: Facts = {
        "proteins": proteins,
        "terms": terms,
        "predictions": proteins * PREDICTED,
        "thresholds": 99,
        "proteins by terms in float64, MB": round(proteins * terms * 8 / 1e6),
    }
    for index, (case, unit) in enumerate([(TIME, "s"), (MEMORY, "MB")]):
        contenders = tuple(Contender(name, partial(value, name, index), "value") for name in commands)
        yield Case(case, unit, contenders, better="lower", rounds=1, facts=facts)


def run_measured(words: list[str]) -> tuple[float, float]:
    """Seconds and peak resident MB of a module of Python with its arguments.

    In a small process of its own: Linux counts what a process held before it became another program.
    """
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", *words], stdout=sys.stderr, check=True)
    return time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6


def write_files(folder: Path, proteins: int, terms: int) -> None:
    """An ontology, annotations, predictions and weights, all random."""
    random = np.random.default_rng(0)
    names = np.array([f"GO:{number:07d}" for number in range(terms)])
    with (folder / "terms.obo").open("w") as file:
        for number, name in enumerate(names):
            file.write(f"[Term]\nid: {name}\nname: {number}\nnamespace: biological_process\n")
            # Of terms before it, so that the graph has no cycle.
            parents = random.integers(number, size=1 + (random.random() < 0.3)) if number else ()
            file.writelines(f"is_a: {names[parent]}\n" for parent in sorted(set(parents)))
            file.write("\n")
    (folder / "accretion.tsv").write_text("".join(f"{name}\t{random.exponential(2.0):.4f}\n" for name in names))
    (folder / "predictions").mkdir()
    with (folder / "truth.tsv").open("w") as truth, (folder / "predictions" / "some.tsv").open("w") as predictions:
        for protein in range(proteins):
            chosen = random.choice(terms, PREDICTED + ANNOTATED, replace=False)
            annotated = chosen[:ANNOTATED]
            predicted = chosen[ANNOTATED - 2 : -2]  # two of the annotated are among them
            truth.writelines(f"P{protein}\t{name}\n" for name in names[annotated])
            scores = random.random(PREDICTED)
            predictions.writelines(
                f"P{protein}\t{name}\t{x:.3f}\n" for name, x in zip(names[predicted], scores, strict=True)
            )


def _difference(folder: Path) -> float:
    names = ("ours/curves.tsv", "peer/evaluation_all.tsv")
    ours, peer = (pd.read_csv(folder / name, sep="\t").drop(columns="ns") for name in names)
    largest = float((ours - peer[ours.columns]).abs().max(axis=None, skipna=False))
    if not largest <= TOLERANCE:  # also where one has a row more, which is NaN
        raise WrongWorkError(f"curves differ by {largest:g}")
    return largest


STAGE = Stage(
    name="function_evaluation",
    summary="predicted terms of proteins evaluated with intervals, beside cafaeval: time and peak memory",
    cases=_cases,
    comparisons=(Comparison(TIME, OURS, PEER, {"cpu": 20.0}), Comparison(MEMORY, OURS, PEER, {"cpu": 4.0})),
    packages=("cafaeval",),
    distributions=("cafaeval", "scipy"),
)
