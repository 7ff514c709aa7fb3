"""Ontologies, annotations and predictions with awkward properties, and cafaeval's results for them.

``cases.json`` has the files and settings of each case, drawn at random: missing terms, unknown proteins, repeats, ties
at thresholds, several roots, lone terms. ``expected.json`` has the rows of cafaeval 1.3.0 at the first, middle and last
thresholds. cafaeval is GPL, and nothing here imports it: run ``cafaeval terms.obo predictions truth.tsv`` in a case's
folder, with its settings as ``-norm``, ``-prop``, ``-th_step``, ``-no_orphans`` and ``-ia accretion.tsv``.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy.sparse import csr_array

from esmeray.function.annotations import Annotations, read_accretion, read_annotations, read_scores
from esmeray.function.evaluation import Evaluation, evaluate_functions
from esmeray.function.ontology import Ontology, read_ontology
from esmeray.function.section import EvaluationSection

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text())


class Case(NamedTuple):
    """Files and settings of one evaluation."""

    folder: Path
    settings: EvaluationSection
    accretion: bool


def write_case(folder: Path, number: int) -> Case:
    """Write the files of a case to a new folder."""
    content = CASES[number]
    (folder / "predictions").mkdir(parents=True)
    for name, text in content["files"].items():
        (folder / name).write_text(text)
    return Case(folder, EvaluationSection(**content["settings"]), content["accretion"])


def read(case: Case) -> tuple[Ontology, dict[str, Annotations], dict[str, csr_array]]:
    """Read the ontology, annotations and scores of a case."""
    ontology = read_ontology(case.folder / "terms.obo")
    truth = read_annotations(case.folder / "truth.tsv", ontology, unknown="ignore")
    proteins = {name: annotations.proteins for name, annotations in truth.items()}
    path = case.folder / "predictions" / "some.tsv"
    return ontology, truth, read_scores(path, ontology, proteins, unknown="ignore")


def evaluated(case: Case) -> dict[str, Evaluation]:
    """Evaluate a case with Esmeray; return the results by aspect."""
    ontology, truth, predictions = read(case)
    accretion = read_accretion(case.folder / "accretion.tsv", ontology, "ignore") if case.accretion else {}
    found = {}
    for name, scores in predictions.items():
        weights = {"accretion_V": accretion.get(name), "settings": case.settings, "draws": 0}
        found[name] = evaluate_functions(ontology.aspects[name], truth[name], scores, **weights)
    return {name: evaluation for name, evaluation in found.items() if evaluation.metrics}


def columns(path: Path) -> dict[str, dict[str, list[float]]]:
    """Read the columns of a cafaeval table by aspect; thresholds are in the column ``tau``."""
    by_aspect = pd.read_csv(path, sep="\t").drop(columns="filename").set_index("ns").groupby(level=0)
    return {aspect: rows.to_dict("list") for aspect, rows in by_aspect}
