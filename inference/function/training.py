"""A run of function prediction: predictors fitted, and blended.

In: settings. Out: a folder with ``config.yaml``, the data (:mod:`inference.function.data`), ``embeddings/`` where a
model computes them, a network for each aspect or ``classifiers/``, ``validation_hits.npz``, and, last, ``blend.json``
with the weights and what each part and the blend reach on the held-out proteins. Each is written whole or not at all;
the same command makes what is missing, with the same bytes.

The blend is fitted on parts that have seen the training proteins alone; predictions then transfer from all.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, load_npz, save_npz

from common.errors import ConfigError
from common.progress import status_line
from common.publishing import atomic_file, write_atomically, writing
from function.annotations import Annotations
from function.evaluation import Settings, evaluate
from function.predictors import blended, fit_blend
from inference.function.classifier import train_classifier
from inference.function.data import FunctionData, prepare
from inference.function.network import save_network, train_network
from inference.function.parts import Parts, Vectors, network_path, takes_vectors, vectors_of
from run_folder.job import LOCK_FILE, held
from train_config.function_schema import COMPOSITION, FunctionConfig
from train_config.loading import dump_config

log = logging.getLogger(__name__)

BLEND_FILE, CONFIG_FILE = "blend.json", "config.yaml"
_METRICS = ("fmax", "fmax_w")


def train_function(config: FunctionConfig) -> dict[str, Any]:
    """Make what the run lacks; return what ``blend.json`` holds.

    Raises ConfigError for the folder of a run with other settings, DataError for files that can't be used.
    """
    folder, embeddings = Path(config.storage_path).expanduser() / config.name, config.embeddings
    if embeddings.model != COMPOSITION and (model := Path(embeddings.model).expanduser()).is_dir():
        # predictions may be made in another working directory
        config = config.model_copy(update={"embeddings": embeddings.model_copy(update={"model": str(model.resolve())})})
    with held(folder), writing(folder):
        _accept(folder, config)
        if not (folder / BLEND_FILE).is_file():
            _make(folder, config)
    blend: dict[str, Any] = json.loads((folder / BLEND_FILE).read_text(encoding="utf-8"))
    return blend


def _make(folder: Path, config: FunctionConfig) -> None:
    data, vectors_RC = prepare(folder, config.data), None
    if takes_vectors(config):
        vectors_RC = vectors_of(data.store, data.ids, config.embeddings, folder / "embeddings")
    for number, name in enumerate(data.aspects if "network" in config.parts else ()):
        _train(folder, name, config, data, vectors_RC, config.seed + number)
    with status_line() as show:
        show("fitting the blend")
        found = _blend(folder, config, data, vectors_RC)
    write_atomically(folder / BLEND_FILE, json.dumps(found, indent=2) + "\n")


def _accept(folder: Path, config: FunctionConfig) -> None:
    text = dump_config(config.model_copy(update={"storage_path": "."}))
    path = folder / CONFIG_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file() and any(not one.name.startswith((f".{CONFIG_FILE}.", LOCK_FILE)) for one in folder.iterdir()):
        raise ConfigError(f"{folder}: is no run of 'esmeray function train'; choose another name")
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{folder}: is a run with other settings (see {CONFIG_FILE}); remove it or choose another name"
        )
    write_atomically(path, text)


def _train(
    folder: Path, name: str, config: FunctionConfig, data: FunctionData, vectors_RC: Vectors | None, seed: int
) -> None:
    """Train the network of an aspect where it is missing and has terms to learn."""
    path, one, settings = network_path(folder, name), data.aspects[name], config.network
    places_K = one.learnt(settings.min_count)
    if not places_K.size:
        log.warning("%s: no term has network.min_count training proteins, so there is no network", name)
    elif settings.classifier is not None:
        train_classifier(folder, name, data, settings.classifier, places_K)
    elif vectors_RC is not None and not path.is_file():
        with status_line() as show:
            given = vectors_RC[one.records], one.terms, places_K, one.training, one.accretion, settings, seed
            save_network(train_network(*given, lambda text: show(f"network of {name}: {text}")), path)


def _blend(folder: Path, config: FunctionConfig, data: FunctionData, vectors_RC: Vectors | None) -> dict[str, Any]:
    """Weights and values on the held-out proteins by aspect."""
    parts = Parts(folder, config, data, vectors_RC, training=True)
    held_out = data.held_out
    bits = _hits(folder / "validation_hits.npz", parts, data.texts(held_out))
    found = {}
    for name, one in data.aspects.items():
        rows = np.flatnonzero(~one.training)
        records = one.records[rows]
        vectors_NC = None if vectors_RC is None else vectors_RC[records]
        of_rows = None if bits is None else csr_array(bits[np.searchsorted(held_out, records)])
        if not (scores := parts.scores(name, data.texts(records), vectors_NC, of_rows)):
            continue
        weights = fit_blend(scores, one.terms[rows], one.accretion)
        truth = Annotations(tuple(data.ids[record] for record in records), one.terms[rows])
        values = {}
        for part, some in {**scores, "blend": blended(scores, weights)}.items():
            settings = Settings(draws=0, orphans=False)
            metrics = evaluate(one.aspect, truth, some, accretion_V=one.accretion, settings=settings).metrics
            values[part] = {metric: metrics[metric].value if metrics else 0.0 for metric in _METRICS}
        found[name] = {"weights": weights, "proteins": len(rows), "validation": values}
    return found


def _hits(path: Path, parts: Parts, texts: list[str]) -> csr_array | None:
    if not path.is_file():
        if (found := parts.hits(texts)) is None:
            return None
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            save_npz(file, found)
    return csr_array(load_npz(path))
