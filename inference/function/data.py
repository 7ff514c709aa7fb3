"""The proteins of a run: sequences, ontology, annotations, and who is held out.

In: the files that the settings name, or the embedded sample. Out, in the folder of the run, so that it can be used
without them: ``sequences/`` (a store), and ``data/`` with ``terms.obo``, ``annotations.tsv`` (the most specific terms),
``accretion.tsv`` and ``validation.txt``.

Shape legend: R records of the store, M annotated proteins of an aspect, V its terms.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from scipy.sparse import csr_array

from common.errors import DataError
from common.progress import conversion_bar
from common.publishing import exclusive, published
from common.text import counted
from dataset.batches.splitting import split_records
from dataset.store.conversion import ensure_store
from dataset.store.reader import Store
from function.annotations import (
    EXPERIMENTAL,
    Annotations,
    information_accretion,
    read_accretion,
    read_annotations,
)
from function.ontology import Aspect, Ontology, lines_of, read_ontology
from function.sample import write_sample
from train_config.function_schema import SAMPLE, FunctionDataSection
from train_config.schema import DataSection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AspectData:
    """Annotated proteins of one aspect.

    Attributes:
        records: (M,) int64 their records.
        terms: (M, V) bool, propagated.
        accretion: (V,) bits.
        training: (M,) bool; the others are held out.
    """

    aspect: Aspect
    records: NDArray[np.int64]
    terms: csr_array
    accretion: NDArray[np.float64]
    training: NDArray[np.bool_]

    def learnt(self, min_count: int) -> NDArray[np.int64]:
        """(K,) places of the terms that so many training proteins have."""
        count_V = np.bincount(self.terms[self.training].indices, minlength=self.terms.shape[1])
        return np.flatnonzero(count_V >= min_count)


@dataclass(frozen=True)
class FunctionData:
    """Sequences and aspects of a run."""

    store: Store
    ids: list[str]
    aspects: dict[str, AspectData]

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Records that are held out in any aspect, ascending."""
        return np.unique(np.concatenate([one.records[~one.training] for one in self.aspects.values()]))

    def texts(self, records: NDArray[np.int64]) -> list[str]:
        """Sequences of these records."""
        return [self.store.text(record) for record in records.tolist()]


def prepare(folder: Path, data: FunctionDataSection) -> FunctionData:
    """Make what is missing of the run's data, and read it. Raises DataError for files that can't be used."""
    sources, annotations, ontology = data.sequences, data.annotations, data.ontology
    if sources == [SAMPLE]:
        _once(folder / SAMPLE, lambda building: write_sample(building, data.sample))
        sources = [str(folder / SAMPLE / "train.fasta")]
        annotations, ontology = (str(folder / SAMPLE / name) for name in ("train.tsv", "terms.obo"))
    with conversion_bar("reading sequences") as progress:
        section = DataSection(source=sources, ingest=data.ingest)
        if (Path(sources[0]) / "manifest.json").is_file():
            given = ensure_store(section, folder, progress)
            _once(folder / "sequences", lambda building: shutil.copytree(given, building, dirs_exist_ok=True))
        else:
            ensure_store(section.model_copy(update={"store": str(folder / "sequences")}), folder, progress)
    store = Store(folder / "sequences")
    _once(folder / "data", lambda building: _write(building, store, data, Path(str(annotations)), Path(str(ontology))))
    return read(folder, store)


def read(folder: Path, store: Store) -> FunctionData:
    """The data that :func:`prepare` made. Raises DataError where an aspect has no protein to train or to hold out."""
    made = folder / "data"
    ontology = read_ontology(made / "terms.obo")
    accretion = read_accretion(made / "accretion.tsv", ontology)
    held_out = {line.strip() for _, line in lines_of(made / "validation.txt")}
    ids = [store.id(record) for record in range(len(store))]
    places = {name: record for record, name in enumerate(ids)}
    aspects = {}
    for name, some in read_annotations(made / "annotations.tsv", ontology).items():
        training_M = np.array([protein not in held_out for protein in some.proteins])
        if training_M.all() or not training_M.any():
            log.warning("%s is left out: it needs proteins to train with and held-out ones; see data.validation", name)
            continue
        records_M = np.array([places[protein] for protein in some.proteins])
        aspects[name] = AspectData(ontology.aspects[name], records_M, some.terms, accretion[name], training_M)
    if not aspects:
        raise DataError(f"{folder}: no aspect has proteins to train with and held-out ones; hold out others, or more")
    return FunctionData(store, ids, aspects)


def _once(target: Path, write: Callable[[Path], object]) -> None:
    """Make a folder that is not there yet, whole or not at all."""
    with exclusive(target):
        if not target.exists():
            with published(target) as building:
                write(building)


def _write(building: Path, store: Store, data: FunctionDataSection, annotations: Path, obo: Path) -> None:
    ontology = read_ontology(obo)
    evidence = tuple(data.evidence) or EXPERIMENTAL
    read_some = partial(read_annotations, annotations, ontology, unknown=data.unknown, evidence=evidence)
    found = read_some()
    ids = [store.id(record) for record in range(len(store))]
    known = _with_sequences(found, set(ids), annotations)
    accretion = {name: information_accretion(some, ontology.aspects[name]) for name, some in known.items()}
    if data.ia:
        accretion |= read_accretion(Path(data.ia), ontology, data.unknown)
    held_out = _held_out(store, ids, data, partial(read_some, before=data.since))
    with (building / "terms.obo").open("w", encoding="utf-8") as file:
        file.writelines(line for _, line in lines_of(obo))
    lines = [f"{protein}\t{term}\n" for name, some in known.items() for protein, term in _leaves(some, ontology, name)]
    (building / "annotations.tsv").write_text("".join(lines), encoding="utf-8")
    rows = (zip(ontology.aspects[name].terms, values.tolist(), strict=True) for name, values in accretion.items())
    lines = [f"{term}\t{value!r}\n" for some in rows for term, value in some if value]
    (building / "accretion.tsv").write_text("".join(lines), encoding="utf-8")
    (building / "validation.txt").write_text("".join(f"{one}\n" for one in ids if one in held_out), encoding="utf-8")


def _with_sequences(found: dict[str, Annotations], ids: set[str], path: Path) -> dict[str, Annotations]:
    known, missing = {}, set()
    for name, some in found.items():
        kept = [place for place, protein in enumerate(some.proteins) if protein in ids]
        missing |= set(some.proteins) - ids
        if kept:
            known[name] = Annotations(tuple(some.proteins[place] for place in kept), some.terms[kept])
    if missing:
        log.warning("%s: %s without a sequence left out", path, counted(len(missing), "protein{s}"))
    if not known:
        raise DataError(f"{path}: none of its proteins has a sequence, such as {min(missing)}; check the ids")
    return known


def _leaves(some: Annotations, ontology: Ontology, name: str) -> Iterator[tuple[str, str]]:
    """Protein and term of the annotations without those of other annotations' ancestors."""
    aspect = ontology.aspects[name]
    specific = (some.terms > (some.terms @ aspect.parents)).tocoo()
    for protein, term in zip(*specific.coords, strict=True):
        yield some.proteins[protein], aspect.terms[term]


def _held_out(store: Store, ids: list[str], data: FunctionDataSection, earlier: partial) -> set[str]:
    if data.validation:
        return {line.strip() for _, line in lines_of(Path(data.validation))}
    if data.since:
        return set(ids).difference(*(some.proteins for some in earlier().values()))
    hashes = store.sequence_hashes
    if data.clusters:
        clusters = {row[1]: row[0] for _, line in lines_of(Path(data.clusters)) if len(row := line.split()) > 1}
        if lost := next((name for name in ids if name not in clusters), None):
            raise DataError(f"{data.clusters}: has no cluster of {lost}; cluster all sequences")
        hashes = np.array([xxhash.xxh3_64_intdigest(clusters[name].encode()) for name in ids], np.uint64)
    _, chosen = split_records(hashes, data.validation_share)
    return {ids[record] for record in chosen.tolist()}
