"""A backbone for each aspect, trained end to end or by LoRA: a run of the classifier whose labels are terms.

In: a run's data, and the settings of a classifier experiment. Out, in ``classifiers/`` of the run: a table and weights
of the terms for each aspect, and the run that train_ray.py would make of them; its probabilities.

Shape legend: N proteins, K terms that are learnt, V terms of an aspect.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from common.publishing import write_atomically
from function.predictors import pruned
from inference.function.data import AspectData, FunctionData
from inference.models.source import EXPORT_FOLDER
from train_config.loading import load_config


def train_classifier(folder: Path, name: str, data: FunctionData, settings: str, places_K: NDArray[np.int64]) -> None:
    """Train the classifier of an aspect, or resume it, by the settings of a file.

    A term weighs 1 plus its information accretion in the loss, as it does in the network on embeddings. Raises what
    :func:`training.launch.driver.train` raises; SystemExit with its code where training did not end.
    """
    from training.launch.driver import train  # here: predictions need no Ray

    one, made = data.aspects[name], folder / "classifiers"
    table, weights = made / f"{name}.csv", made / f"{name}_weights.tsv"
    if not table.is_file():
        made.mkdir(exist_ok=True)
        lines = (f"{one.aspect.terms[place]}\t{1 + one.accretion[place]:.6g}\n" for place in places_K)
        write_atomically(weights, "".join(lines))
        write_atomically(table, _table(data, one, places_K))
    labels = {"kind": "multilabel", "id_column": "id", "label_columns": ["terms"], "split": "column"}
    labels |= {"split_column": "split", "missing_labels": "skip"}
    given: dict[tuple[str, ...], Any] = {("data", "labels", key): value for key, value in labels.items()}
    given |= {
        ("run", "name"): name,
        ("run", "storage_path"): str(made),
        ("data", "source"): [str(table)],
        ("data", "store"): None,
    }
    given |= {("model", "task"): "classifier", ("model", "classifier", "label_weights"): str(weights)}
    if code := train(load_config(settings, given)):
        raise SystemExit(code)


def _table(data: FunctionData, one: AspectData, places_K: NDArray[np.int64]) -> str:
    """Proteins and their terms that are learnt."""
    rows = csv.writer(text := StringIO(newline=""), lineterminator="\n")
    rows.writerow(["id", "sequence", "terms", "split"])
    for row, record in enumerate(one.records.tolist()):
        places = one.terms.indices[slice(*one.terms.indptr[row : row + 2])]
        terms = ";".join(one.aspect.terms[place] for place in places[np.isin(places, places_K)])
        rows.writerow([data.ids[record], data.store.text(record), terms, "train" if one.training[row] else "valid"])
    return text.getvalue()


def load_probabilities(folder: Path, name: str, one: AspectData) -> Callable[[Sequence[str]], csr_array]:
    """The classifier of an aspect, from sequences to (N, V) probabilities.

    Raises ConfigError where it is missing.
    """
    from inference.classifier import ClassifierPipeline

    pipeline = ClassifierPipeline.load(folder / "classifiers" / name / EXPORT_FOLDER)
    places = {term: place for place, term in enumerate(one.aspect.terms)}
    places_K = np.array([places[term] for term in pipeline.label_space.names])

    def probabilities(texts: Sequence[str]) -> csr_array:
        found = pruned(csr_array(pipeline.predict(texts).probabilities.astype(float)))
        return csr_array((found.data, places_K[found.indices], found.indptr), shape=(len(texts), len(places)))

    return probabilities
