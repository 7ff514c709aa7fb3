"""Predictions of a run for the proteins of FASTA files, in CAFA's format.

In: the folder of a run, sequences. Out: a file of protein, term and score with three digits, terms of a protein from
the highest score down, parents before children. Until it is complete everything lies in ``OUTPUT.partial``: the store,
the embeddings, and the lines of the blocks of proteins that are done; the same command computes the others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.sparse import csr_array, hstack

from common.errors import ConfigError, DataError
from common.progress import record_bar
from common.publishing import file_xxh128, made_file
from dataset.embeddings.manifest import parts as ranges
from dataset.embeddings.reader import open_vectors
from dataset.store.conversion import open_store
from dataset.store.reader import Store
from function.predictors import blended
from function.propagation import propagate
from inference.function.data import FunctionData, read
from inference.function.parts import Parts, takes_vectors, vectors_of
from inference.function.training import BLEND_FILE, CONFIG_FILE
from run_folder.job import accept, unfinished
from run_folder.journal import Journal, journal
from train_config.function_schema import COMPOSITION, FunctionConfig
from train_config.schema import IngestSection

MADE_BY = "predict_function"
_BLOCK = 1024


def _finished(folder: Path) -> tuple[FunctionConfig, dict[str, Any]]:
    """Settings and blend of a finished run. Raises ConfigError where there is none, DataError where it is damaged."""
    if not (folder / BLEND_FILE).is_file():
        raise ConfigError(f"{folder}: is no finished run of 'esmeray function train'; give one, or run it again")
    try:
        config, blend = ((folder / name).read_text(encoding="utf-8") for name in (CONFIG_FILE, BLEND_FILE))
        return FunctionConfig.model_validate(yaml.safe_load(config)), json.loads(blend)
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"{CONFIG_FILE} or {BLEND_FILE} is damaged ({type(error).__name__})"
        raise DataError(f"{folder}: {problem}; train again") from error


def predict(
    run: Path, sources: list[str], output: Path, *, terms: int, part: str, ingest: IngestSection, overwrite: bool
) -> int:
    """Write the predictions of the blend, or of one part; return the number of proteins.

    Raises ConfigError for work of another command in ``OUTPUT.partial``, DataError for sequences that can't be read.
    """
    config, blend = _finished(run)
    weights = {name: one["weights"] for name, one in blend.items()}
    if part != "blend":
        known = ", ".join(dict.fromkeys(each for one in weights.values() for each in one))
        config = config.model_copy(update={"parts": [part]})
        if not (weights := {name: {part: 1.0} for name, one in weights.items() if part in one}):
            raise ConfigError(f"--part {part}: the run has {known}")
    with unfinished(output) as partial:
        store = open_store(sources, ingest, partial)
        job = {"run": file_xxh128(run / BLEND_FILE), "input": store.checksum, "part": part, "terms": terms}
        accept(partial, job)
        with journal(partial) as kept:
            _predict(run, config, weights, store, partial, terms, kept)
            with made_file(output, MADE_BY, overwrite) as building, building.open("w", encoding="utf-8") as file:
                file.writelines(kept.lines())
        shutil.rmtree(partial)
    return len(store)


def _predict(
    run: Path,
    config: FunctionConfig,
    weights: dict[str, dict[str, float]],
    store: Store,
    partial: Path,
    terms: int,
    kept: Journal,
) -> None:
    """Add the lines of the blocks that are missing. ``weights``: of the parts of each aspect."""
    blocks = list(ranges(len(store), _BLOCK))[kept.done :]
    if not blocks:
        return
    ids = [store.id(record) for record in range(len(store))]
    data = read(run, Store(run / "sequences"))
    known_RC = vectors_NC = None
    if takes_vectors(config):
        computed = config.embeddings.model_copy(update={"store": None})
        vectors_NC = vectors_of(store, ids, computed, partial / "embeddings")
        known_RC = vectors_of(data.store, data.ids, config.embeddings, run / "embeddings")
        if computed.model != COMPOSITION:
            _same_model(partial / "embeddings", run / "embeddings")
    parts = Parts(run, config, data, known_RC, training=False)
    with record_bar("predicting") as bar:
        for start, stop in blocks:
            texts = [store.text(record) for record in range(start, stop)]
            bits = parts.hits(texts)
            some_nC = None if vectors_NC is None else vectors_NC[start:stop]
            found = {}
            for name, of in weights.items():
                scores = blended(parts.scores(name, texts, some_nC, bits), of)
                found[name] = propagate(_thousandths(scores), data.aspects[name].aspect)
            kept.add(_lines(ids[start:stop], data, found, terms))
            bar(stop / len(store), stop)


def _same_model(queries: Path, known: Path) -> None:
    jobs = [open_vectors(folder).manifest.job.get("model") for folder in (queries, known)]
    if jobs[0] != jobs[1]:
        raise DataError(f"{known}: was computed by other weights than the run's model has now; train again")


def _thousandths(scores: csr_array) -> csr_array:
    """Scores in whole thousandths, which are compared and written exactly."""
    whole = csr_array((np.rint(scores.data * 1000).astype(np.int32), scores.indices, scores.indptr), shape=scores.shape)
    whole.eliminate_zeros()
    return whole


def _lines(ids: list[str], data: FunctionData, found: dict[str, csr_array], terms: int) -> Iterator[str]:
    """Lines of the highest scores; of equal ones the term that is nearer to the root is first."""
    joined = csr_array(hstack(list(found.values()), format="csr"))
    joined.sort_indices()
    names = [term for name in found for term in data.aspects[name].aspect.terms]
    for row, protein in enumerate(ids):
        places = slice(*joined.indptr[row : row + 2])
        scores, columns = joined.data[places], joined.indices[places]
        for place in np.argsort(-scores, kind="stable")[:terms].tolist():
            yield f"{protein}\t{names[columns[place]]}\t{scores[place] / 1000:.3f}"
