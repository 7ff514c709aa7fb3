"""Function prediction by a finished run: fit the blend of its parts, and predict the proteins of FASTA files.

The run's folder ``function`` is written completely or not at all. It holds:

- the data (:mod:`esmeray.function.proteins`) and the vectors
- ``ranker_ASPECT.npz``
- ``calibration_ASPECT.json``: calibration of the ranker's scores and thresholds of conformal sets, fitted to the
  held-out proteins until :func:`evaluate_sets` calibrates with others
- ``blend.json``: weights, and the metrics of each part, the blend and the ranker on the held-out proteins

Blend and ranker are fitted on parts that know the training proteins only. Predictions then transfer from all proteins.

Predictions are in CAFA's format: protein, term, and score with three digits. The terms of a protein are in descending
order of score, parents before children. Until the file is complete, ``OUTPUT.partial`` holds the store, the embeddings,
and the lines of finished blocks of proteins. The same command resumes the job.
"""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.table import Table
from scipy.sparse import csr_array, hstack

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError, DataError, read_json
from esmeray.common.progress import record_bar, status_line
from esmeray.common.publishing import (
    file_xxh128,
    grown_folder,
    made_file,
    made_folder,
    output_or_scratch,
    refuse_file,
    verified,
)
from esmeray.common.text import counted
from esmeray.dataset.embeddings.manifest import ranges
from esmeray.dataset.section import DataSection, IngestSection
from esmeray.dataset.sequence_list import checked_paths
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.store.reader import Store
from esmeray.function.annotations import EXPERIMENTAL, Annotations, read_annotations
from esmeray.function.evaluation import evaluate_functions
from esmeray.function.ontology import propagate, read_ontology
from esmeray.function.predictors import blended, fit_blend
from esmeray.function.proteins import FunctionData, prepare, read
from esmeray.function.ranker import Ranker, fit_ranker, scored
from esmeray.function.section import EvaluateTermsSection, EvaluationSection, PredictTermsSection
from esmeray.function.submission import check_submission
from esmeray.function.vectors import Vectors, read_vectors
from esmeray.inference.calibration import COVERAGE, HELD_OUT, Calibration, thresholds_of
from esmeray.inference.function.parts import Parts, Queries, takes_vectors
from esmeray.inference.function.sets import bins_of, calibrated, fit_sets, in_sets, pairs_of
from esmeray.inference.function.vectors import load_known, save_known, vectors_of
from esmeray.run_folder.job import Journal, accept, journal, unfinished
from esmeray.run_folder.paths import EXPORT, RunFolder
from esmeray.run_folder.section import RunSection
from esmeray.tasks.terms.section import TermsSection
from esmeray.training.config import load_config

if TYPE_CHECKING:
    from esmeray.inference.settings import PredictFunctionsSettings

log = logging.getLogger(__name__)

TRAIN = "esmeray train --config train_config/function.yaml"
MADE_BY = "predict_function"
_BLEND_MADE_BY, FOLDER, BLEND_FILE = "function", "function", "blend.json"
_METRICS = ("fmax", "fmax_w")
_WHOLE = ("ranker", "blend")
"""Scores that combine all parts."""
_BLOCK = 1024


def finish(section: RunSection, data: DataSection, terms: TermsSection) -> None:
    """Fit the blend of a finished run if necessary, and print the metrics of its parts."""
    run = RunFolder(section.storage_path, section.name)
    target = run.path / FOLDER
    if not target.exists():
        # made_folder adds checksums of the files, which predictions verify.
        with made_folder(target, _BLEND_MADE_BY, overwrite=False) as building, status_line() as show:
            show("fitting the blend")
            shutil.copytree(prepare(data, run.stores), building, dirs_exist_ok=True)
            blend, calibrations = _fitted(building, run.export, terms)
            (building / BLEND_FILE).write_text(json.dumps(blend, indent=2) + "\n", encoding="utf-8")
            _save_calibrations(building, calibrations)
    _print(json.loads((target / BLEND_FILE).read_text(encoding="utf-8")))
    print(HELD_OUT)


def _fitted(folder: Path, export: Path, terms: TermsSection) -> tuple[dict[str, Any], dict[str, Calibration]]:
    """Fit the blend and return its weights and held-out metrics, and the calibration of its sets, by aspect."""
    data = read(folder)
    vectors_RC: Vectors | None = None
    if takes_vectors(terms):
        vectors_RC = read_vectors(data.store, terms.embeddings)
        save_known(vectors_RC, terms.embeddings, folder)
    parts = Parts(export, terms, data, vectors_RC, training=True)
    held_out = data.held_out
    # Searched once, although a protein may be held out in several aspects: the search takes most of the time.
    queries = parts.queries(
        [data.store.text(record) for record in held_out.tolist()], None if vectors_RC is None else vectors_RC[held_out]
    )
    blend, calibrations = {}, {}
    for name, aspect in data.aspects.items():
        rows = np.flatnonzero(~aspect.training)
        queried = np.searchsorted(held_out, aspect.records[rows])
        scores = parts.scores(name, queries, queried)
        if not scores:  # the network is the only part, and it learnt no term of this aspect
            continue
        weights = fit_blend(scores, aspect.terms[rows], aspect.accretion)
        summed = blended(scores, weights)
        pairs = parts.candidates(name, queries, scores, summed, queried)
        ranker, crossed_K = fit_ranker(pairs, aspect.terms[rows])
        ranker.save(folder / f"ranker_{name}.npz")
        predicted = {**scores, "blend": summed, "ranker": scored(crossed_K, pairs, aspect.aspect)}
        sets = fit_sets(aspect.terms[rows], predicted["ranker"], *parts.similarity(name, queries, queried))
        calibrations[name] = sets.model_copy(update={"held_out": True})
        blend[name] = {"weights": weights, "proteins": len(rows), "validation": _values(data, name, rows, predicted)}
    return blend, calibrations


def _save_calibrations(folder: Path, calibrations: dict[str, Calibration]) -> None:
    """Save the calibrations of aspects in the run's folder ``function``."""
    # The blend's checksum identifies the run, because the blend depends on all of its parts.
    fingerprint = file_xxh128(folder / BLEND_FILE)
    for name, calibration in calibrations.items():
        calibration.model_copy(update={"fingerprint": fingerprint}).save(_calibration_file(folder, name))


def _calibration_file(folder: Path, aspect: str) -> Path:
    return folder / f"calibration_{aspect}.json"


def _calibrations(run: Path, aspects: Iterable[str], *, warn: bool = True) -> dict[str, Calibration | None]:
    fingerprint = file_xxh128(run / FOLDER / BLEND_FILE)
    loaded = {name: Calibration.load(_calibration_file(run / FOLDER, name), fingerprint) for name in aspects}
    if warn and any(calibration is not None and calibration.held_out for calibration in loaded.values()):
        log.warning(HELD_OUT)
    return loaded


def _values(
    data: FunctionData, name: str, rows: np.ndarray, scores: dict[str, csr_array]
) -> dict[str, dict[str, float]]:
    """Metrics of each part on the held-out proteins of an aspect; ``rows`` are their rows in the aspect."""
    aspect = data.aspects[name]
    truth = Annotations(tuple(data.ids[record] for record in aspect.records[rows]), aspect.terms[rows])
    # Without intervals: these values guide training. 'esmeray function evaluate' reports intervals.
    settings = EvaluationSection(orphans=False)
    values = {}
    for predictor, predicted in scores.items():
        metrics = evaluate_functions(
            aspect.aspect, truth, predicted, accretion_V=aspect.accretion, settings=settings, draws=0
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


def _finished(run: Path) -> tuple[TermsSection, dict[str, Any]]:
    """Settings and blend of a finished run. Raises ConfigError if there is none, DataError if it is damaged."""
    blend = run / FOLDER / BLEND_FILE
    if not blend.is_file():
        raise ConfigError(f"{run}: is not a finished run of function prediction; give one, or train one: {TRAIN}")
    for path in blend.parent.rglob("*"):
        if path.is_file():
            verified(path)
    return load_config(run / "config.yaml", is_stored=True).model.terms, read_json(blend, "train again")


def _rankers(run: Path, aspects: Iterable[str]) -> dict[str, Ranker]:
    files = {name: run / FOLDER / f"ranker_{name}.npz" for name in aspects}
    if not all(path.is_file() for path in files.values()):
        raise ConfigError(f"{run}: was trained by a version without rankers; give --predict.part blend, or train again")
    return {name: Ranker.load(path) for name, path in files.items()}


def evaluate_sets(run: Path, options: EvaluateTermsSection) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Evaluate the sets of COVERAGE and the calibrated probabilities of proteins.

    Returns the aspect, bits per residue of the best hit, coverage and size of each protein's set; and the aspect and
    the columns of :func:`pairs_of` of each scored term of a protein.

    With ``options.calibrate``, calibrate the run with these proteins first. Raises DataError if the run transfers terms
    from one of them.
    """
    settings, blend = _finished(run)
    rankers = _rankers(run, blend)
    with TemporaryDirectory() as scratch:
        store = job_store(options.input, IngestSection(), Path(scratch))
        parts, vectors_NC = _opened(run, settings, store, Path(scratch))
        ids = [store.id(record) for record in range(len(store))]
        truth = read_annotations(
            options.truth,
            read_ontology(run / FOLDER / "terms.obo"),
            proteins=ids,
            aspect=options.aspect,
            unknown=options.unknown,
            evidence=options.evidence or EXPERIMENTAL,
            since=options.since,
            before=options.before,
        )
        known = np.isin(store.sequence_hashes, parts.data.store.sequence_hashes)
        if known.any():
            raise DataError(f"{known.sum():,} of the proteins are in the run's data; leave them out")
        queries = parts.queries([store.text(record) for record in range(len(store))], vectors_NC)
    compared = {}
    for name in truth.keys() & blend.keys():
        rows = pd.Index(ids).get_indexer(truth[name].proteins)
        scores = _scores(parts, name, queries, blend[name]["weights"], rankers[name], rows)
        compared[name] = (scores, *parts.similarity(name, queries, rows))
    if not compared:
        raise DataError(f"{options.truth}: no terms in the aspects of the run: {', '.join(blend)}")
    fitted: dict[str, Calibration] = {}
    if options.calibrate:
        fitted = {name: fit_sets(truth[name].terms, *sets) for name, sets in compared.items()}
    calibrations = fitted or _calibrations(run, compared)
    tables, pairs = [], []
    for name, sets in compared.items():
        # Before the calibration is saved, this refuses too few proteins.
        calibration = calibrations[name]
        thresholds = thresholds_of(calibration, COVERAGE)
        assert calibration is not None  # otherwise refused above
        scores, frequency_V, nearest_N = sets
        covered_N, sizes_N = np.zeros((2, len(nearest_N)))
        for start, stop in ranges(len(nearest_N), _BLOCK):  # a block of proteins by all terms is dense
            block = slice(start, stop)
            contained = in_sets(scores[block], frequency_V, nearest_N[block], thresholds)
            terms = truth[name].terms[block].toarray()
            covered_N[block] = (contained & terms).sum(axis=1) / terms.sum(axis=1)
            sizes_N[block] = contained.sum(axis=1)
        columns = {"aspect": name, "bits": bins_of(nearest_N), "coverage": covered_N, "set_size": sizes_N}
        tables.append(pd.DataFrame(columns, truth[name].proteins))
        pairs.append(pairs_of(truth[name].terms, *sets, calibration).assign(aspect=name))
    if fitted:
        with grown_folder(run / FOLDER, run / FOLDER, _BLEND_MADE_BY) as building:
            _save_calibrations(building, fitted)
    return pd.concat(tables), pd.concat(pairs)


def predict_functions(
    run: str | Path,
    input: str | Path | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    **settings: "Unpack[PredictFunctionsSettings]",
) -> pd.DataFrame:
    """Predict the functions of proteins by a finished run, as ``esmeray function predict``.

    Args:
        run: folder of a run that train_config/function.yaml trained.
        input: FASTA file, folder, glob or store; or a list of files.
        output: TSV file to write; by default nothing is written.
        overwrite: replace an output that a prediction made.
        settings: others of the command: ``format``, ``terms``, ``part`` and ``coverage``.

    Returns a row for each protein and term: ``protein``, ``term`` and ``score``, the highest scores of a protein first.
    Raises EsmerayError for what the command refuses.

    >>> table = esmeray.predict_functions("functions", "proteins.fasta", part="naive", terms=2)
    >>> [*table.columns], table["protein"].unique().tolist()
    (['protein', 'term', 'score'], ['first', 'second', 'third'])
    """
    with output_or_scratch(output) as target:
        section = PredictTermsSection.of(input=checked_paths(input, "input"), output=target, **settings)
        predict(Path(str(run)), section, IngestSection(), overwrite=overwrite)
        columns = {"protein": str, "term": str, "score": float}
        # Ids are text, whatever they look like: "NA", "1e5" and "5'" are proteins' names. 3 is csv.QUOTE_NONE.
        return pd.read_csv(section.output, sep="\t", names=[*columns], dtype=columns, na_filter=False, quoting=3)


def predict(run: Path, options: PredictTermsSection, ingest: IngestSection, *, overwrite: bool) -> int:
    """Write the predictions of the ranker, the blend or one part, and return the number of proteins.

    Raises ConfigError if another command's work is in ``OUTPUT.partial``, DataError for unreadable sequences.
    """
    part, output = options.part, options.output
    refuse_file(output, MADE_BY, overwrite)
    settings, blend = _finished(run)
    weights = {name: aspect["weights"] for name, aspect in blend.items()}
    if part not in _WHOLE:
        known = ", ".join(dict.fromkeys(name for parts in weights.values() for name in parts))
        settings = settings.model_copy(update={"parts": [part]})
        weights = {name: {part: 1.0} for name, parts in weights.items() if part in parts}
        if not weights:
            raise ConfigError(f"--predict.part {part}: the run has {known}")
    rankers = _rankers(run, weights) if part == "ranker" else {}
    calibrations = _calibrations(run, weights, warn=options.coverage is not None) if part == "ranker" else {}
    thresholds = {}
    if options.coverage is not None:
        # Before anything is computed: this refuses a coverage that the calibration does not reach.
        thresholds = {name: thresholds_of(sets, options.coverage) for name, sets in calibrations.items()}
    with unfinished(output, MADE_BY) as partial:
        store = job_store(options.input, ingest, partial)
        accept(
            partial,
            {
                "run": file_xxh128(run / FOLDER / BLEND_FILE),
                "input": store.checksum,
                "part": part,
                "format": options.format,
                "terms": options.most_terms,
                "coverage": options.coverage,
                # A later calibration of the run would give other scores and sets than the finished blocks have.
                "calibrations": {
                    name: file_xxh128(_calibration_file(run / FOLDER, name))
                    for name, calibration in calibrations.items()
                    if calibration is not None
                }
                or None,
            },
        )
        with journal(partial) as done:
            _predict(run, settings, weights, rankers, calibrations, thresholds, store, partial, options, done)
            with made_file(output, MADE_BY, overwrite) as building:
                with building.open("w", encoding="utf-8") as file:
                    file.writelines(done.lines())
                if options.format == "cafa6":
                    # Checked before the file gets its final name: a competition allows only a few submissions a day.
                    check_submission(building, read_ontology(run / FOLDER / "terms.obo"))
    return len(store)


def _opened(run: Path, settings: TermsSection, store: Store, folder: Path) -> tuple[Parts, Vectors | None]:
    """Return the run's parts, and the vectors of the proteins to predict, computed into ``folder``."""
    known_RC = vectors_NC = None
    if takes_vectors(settings):
        vectors_NC = vectors_of(store, settings.embeddings, folder / "embeddings")
        known_RC = load_known(run / FOLDER, folder / "embeddings")
    return Parts(run / EXPORT, settings, read(run / FOLDER), known_RC, training=False), vectors_NC


def _scores(
    parts: Parts, name: str, queries: Queries, weights: dict[str, float], ranker: Ranker | None, rows: Any = slice(None)
) -> csr_array:
    """(N, V) scores of an aspect by the ranker, or without one by the parts' weights."""
    scores = parts.scores(name, queries, rows)
    summed = blended(scores, weights)
    if ranker is None:
        return summed
    pairs = parts.candidates(name, queries, scores, summed, rows)
    return scored(ranker.probabilities(pairs.features), pairs, parts.data.aspects[name].aspect)


def _predict(
    run: Path,
    settings: TermsSection,
    weights: dict[str, dict[str, float]],
    rankers: dict[str, Ranker],
    calibrations: dict[str, Calibration | None],
    thresholds: dict[str, NDArray[np.float64]],
    store: Store,
    partial: Path,
    options: PredictTermsSection,
    done: Journal,
) -> None:
    """Append the lines of missing blocks.

    Each aspect has weights of the parts, and may have a ranker, a calibration of its scores, and thresholds of sets.
    """
    blocks = list(ranges(len(store), _BLOCK))[done.done :]
    if not blocks:  # killed between the last block and the output: no model is needed
        return
    ids = [store.id(record) for record in range(len(store))]
    parts, vectors_NC = _opened(run, settings, store, partial)
    with record_bar("predicting") as bar:
        for start, stop in blocks:
            queries = parts.queries(
                [store.text(record) for record in range(start, stop)],
                None if vectors_NC is None else vectors_NC[start:stop],
            )
            predicted = {}
            for name, aspect_weights in weights.items():
                aspect = parts.data.aspects[name].aspect
                summed = _scores(parts, name, queries, aspect_weights, rankers.get(name))
                # Propagated after rounding, so that a parent's score is never below its child's.
                predicted[name] = propagate(_thousandths(calibrated(summed, calibrations.get(name))), aspect)
                if name in thresholds:
                    contained = in_sets(summed, *parts.similarity(name, queries), thresholds[name])
                    # Terms without a score stay as explicit zeros.
                    predicted[name] = csr_array(
                        (predicted[name].toarray()[contained], np.nonzero(contained)), contained.shape
                    )
                if options.format == "cafa6":
                    predicted[name] = csr_array(predicted[name].multiply(aspect.levels > 0))
                    predicted[name].eliminate_zeros()
            done.add(_lines(ids[start:stop], parts.data, predicted, None if thresholds else options.most_terms))
            bar(stop / len(store), stop)


def _thousandths(scores: csr_array) -> csr_array:
    """Scores as integer thousandths, which compare and print exactly."""
    whole = csr_array((np.rint(scores.data * 1000).astype(np.int32), scores.indices, scores.indptr), shape=scores.shape)
    whole.eliminate_zeros()
    return whole


def _lines(ids: list[str], data: FunctionData, predicted: dict[str, csr_array], terms: int | None) -> Iterator[str]:
    """Lines of the highest scores, of all if ``terms`` is None; on a tie the term nearer to the root comes first."""
    joined = csr_array(hstack(list(predicted.values()), format="csr"))
    joined.sort_indices()
    names = [term for name in predicted for term in data.aspects[name].aspect.terms]
    for row, protein in enumerate(ids):
        entries = slice(*joined.indptr[row : row + 2])
        scores, columns = joined.data[entries], joined.indices[entries]
        # A stable sort, because the terms of an aspect are in ontology order, from the root.
        for entry in np.argsort(-scores, kind="stable")[:terms].tolist():
            yield f"{protein}\t{names[columns[entry]]}\t{scores[entry] / 1000:.3f}"
