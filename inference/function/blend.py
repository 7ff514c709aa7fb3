"""The end of a run of function prediction: the parts weighted on its held-out proteins.

The run's folder ``function``, whole or not at all, has the data (:mod:`esmeray.function.proteins`), the vectors, and
``blend.json`` with the weights and the values that each part and the blend reach on the held-out proteins.
The blend is fitted on parts that have seen the training proteins alone; predictions then transfer from all.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.sparse import csr_array

from esmeray.common.command_line import result_console
from esmeray.common.progress import status_line
from esmeray.common.publishing import made_folder
from esmeray.common.text import counted
from esmeray.dataset.section import DataSection
from esmeray.function.annotations import Annotations
from esmeray.function.evaluation import evaluate_functions
from esmeray.function.predictors import blended, fit_blend
from esmeray.function.proteins import FunctionData, prepare, read
from esmeray.function.section import EvaluationSection
from esmeray.function.vectors import Vectors, read_vectors
from esmeray.inference.function.parts import Parts, takes_vectors
from esmeray.inference.function.vectors import save_known
from esmeray.run_folder.paths import RunFolder
from esmeray.run_folder.section import RunSection
from esmeray.tasks.terms.section import TermsSection

MADE_BY, FOLDER, BLEND_FILE = "function", "function", "blend.json"
_METRICS = ("fmax", "fmax_w")


def finish(section: RunSection, data: DataSection, terms: TermsSection) -> None:
    """Fit the blend of a finished run where that is not done, and print the values of its parts."""
    run = RunFolder(section.storage_path, section.name)
    target = run.path / FOLDER
    if not target.exists():
        # With checksums of its files, by which predictions verify them.
        with made_folder(target, MADE_BY, overwrite=False) as building, status_line() as show:
            show("fitting the blend")
            shutil.copytree(prepare(data, run.stores), building, dirs_exist_ok=True)
            blend = _fitted(building, run.export, terms)
            (building / BLEND_FILE).write_text(json.dumps(blend, indent=2) + "\n", encoding="utf-8")
    _print(json.loads((target / BLEND_FILE).read_text(encoding="utf-8")))


def _fitted(folder: Path, export: Path, terms: TermsSection) -> dict[str, Any]:
    """Weights and values on the held-out proteins by aspect."""
    data = read(folder)
    vectors_RC: Vectors | None = None
    if takes_vectors(terms):
        vectors_RC = read_vectors(data.store, terms.embeddings)
        save_known(vectors_RC, terms.embeddings, folder)
    parts = Parts(export, terms, data, vectors_RC, training=True)
    held_out = data.held_out
    # Searched once, though a protein may be held out in several aspects: the search takes most of the time.
    queries = parts.queries(
        [data.store.text(record) for record in held_out.tolist()], None if vectors_RC is None else vectors_RC[held_out]
    )
    blend = {}
    for name, aspect in data.aspects.items():
        rows = np.flatnonzero(~aspect.training)
        scores = parts.scores(name, queries, np.searchsorted(held_out, aspect.records[rows]))
        if not scores:  # the network alone, which learnt no term of this aspect
            continue
        weights = fit_blend(scores, aspect.terms[rows], aspect.accretion)
        blend[name] = {
            "weights": weights,
            "proteins": len(rows),
            "validation": _values(data, name, rows, {**scores, "blend": blended(scores, weights)}),
        }
    return blend


def _values(
    data: FunctionData, name: str, rows: np.ndarray, scores: dict[str, csr_array]
) -> dict[str, dict[str, float]]:
    """Metrics of each part on the held-out proteins of an aspect, which are at these rows of it."""
    aspect = data.aspects[name]
    truth = Annotations(tuple(data.ids[record] for record in aspect.records[rows]), aspect.terms[rows])
    # Without intervals: a value guides whoever trains; 'esmeray function evaluate' has the whole.
    settings = EvaluationSection(draws=0, orphans=False)
    values = {}
    for predictor, predicted in scores.items():
        metrics = evaluate_functions(
            aspect.aspect, truth, predicted, accretion_V=aspect.accretion, settings=settings
        ).metrics
        values[predictor] = {metric: metrics[metric].value if metrics else 0.0 for metric in _METRICS}
    return values


def _print(blend: dict[str, Any]) -> None:
    console = result_console()
    for name, aspect in blend.items():
        table = Table("part", "weight", "Fmax", "weighted Fmax")
        for predictor, values in aspect["validation"].items():
            weight = f"{aspect['weights'][predictor]:.2f}" if predictor in aspect["weights"] else ""
            table.add_row(predictor, weight, f"{values['fmax']:.3f}", f"{values['fmax_w']:.3f}")
        console.print(f"{name}: {counted(aspect['proteins'], 'held-out protein{s}')}")
        console.print(table)
