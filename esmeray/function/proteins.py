"""Data of function prediction: sequences, ontology, annotations and held-out proteins.

In: the files that the settings name, or the embedded sample. Out, in a folder next to the stores: ``sequences`` (a link
to their store), ``terms.obo``, ``annotations.tsv`` (the most specific terms), ``accretion.tsv`` and ``validation.txt``.
Ids in all files match the sequences' ids in any spelling (:mod:`esmeray.dataset.identifiers`).

Shape legend: R records of the store, M annotated proteins of an aspect, V terms of an aspect, K learnt terms over all
aspects.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack

from esmeray.common.errors import ConfigError, DataError, expanded
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.common.publishing import exclusive, published
from esmeray.common.text import counted
from esmeray.dataset.batches.random_bits import split_records
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.section import DataSection
from esmeray.dataset.store.conversion import SAMPLE, ensure_store, file_identities, name_of_content, store_location
from esmeray.dataset.store.reader import Store
from esmeray.dataset.table import numbered_lines
from esmeray.dataset.targets import LabelSpace, SparseTargets
from esmeray.function.annotations import (
    EXPERIMENTAL,
    Annotations,
    information_accretion,
    read_accretion,
    read_annotations,
)
from esmeray.function.ontology import Aspect, Ontology, read_ontology
from esmeray.function.sample import write_sample

log = logging.getLogger(__name__)

SEQUENCES = "sequences"
_RULES = 2
"""Version of the parsing rules; folders of other versions are built again."""
_FILES = ("terms.obo", "annotations.tsv", "accretion.tsv", "validation.txt")


@dataclass(frozen=True)
class AspectData:
    """Annotated proteins of one aspect: records (M,), propagated terms (M, V), and a training mask (M,).

    ``accretion``: (V,) bits.
    """

    aspect: Aspect
    records: NDArray[np.int64]
    terms: csr_array
    accretion: NDArray[np.float64]
    training: NDArray[np.bool_]

    def learnt(self, min_count: int) -> NDArray[np.int64]:
        """Return the (K,) columns of terms that at least ``min_count`` training proteins have."""
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
        return np.unique(np.concatenate([aspect.records[~aspect.training] for aspect in self.aspects.values()]))


def location(data: DataSection, root: Path) -> Path:
    """Return the folder that :func:`prepare` makes, named after files and settings. Raises ConfigError or DataError."""
    terms = data.terms
    if (data.source == [SAMPLE]) != (terms.annotations is None):
        raise ConfigError(
            "data.terms.annotations: data.source, data.terms.annotations and data.terms.ontology must all be "
            "set, or none of them to use the sample"
        )
    # Without min_count: the learnt terms are chosen when the folder is read, so that runs can share it.
    settings = terms.model_dump(mode="json", exclude={"min_count"}) | {"validation_share": data.validation_share}
    settings["rules"] = _RULES
    if data.source == [SAMPLE]:
        sample = data.sample.model_dump() | {"seed": 0}  # a setting in earlier versions
        return root / name_of_content("sample-terms", [settings, sample])
    paths = [
        expanded(name)
        for name in (terms.annotations, terms.ontology, terms.ia, terms.validation, terms.clusters)
        if name
    ]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise DataError(f"{missing}: file not found; check data.terms")
    return root / name_of_content(
        f"{paths[0].name}-terms", [settings, str(store_location(data, root)), file_identities(paths)]
    )


def prepare(data: DataSection, root: Path, progress: ProgressCallback = no_progress) -> Path:
    """Build the data of a run if it is missing, and return its folder. Raises DataError for unusable files."""
    target = location(data, root)
    if data.source == [SAMPLE]:
        data = _of_sample(data, target.with_name(f"{target.name}-{SAMPLE}"))
    sequences = ensure_store(data, root, progress)
    with exclusive(target):
        if not target.exists():
            with published(target) as building:
                (building / SEQUENCES).symlink_to(sequences)
                sample = target.with_name(f"{target.name}-{SAMPLE}")
                if sample.exists():  # its test proteins are for evaluating the run
                    (building / SAMPLE).symlink_to(sample)
                _write(building, Store(sequences), data)
    return target


def _of_sample(data: DataSection, folder: Path) -> DataSection:
    """Return the settings with the sample's files, which are written to the folder together with the test files."""
    with exclusive(folder):
        if not folder.exists():
            with published(folder) as building:
                write_sample(building, data.sample)
    terms = data.terms.model_copy(
        update={"annotations": str(folder / "train.tsv"), "ontology": str(folder / "terms.obo")}
    )
    return data.model_copy(update={"source": [str(folder / "train.fasta")], "terms": terms})


def read(folder: Path) -> FunctionData:
    """Read the data that :func:`prepare` made.

    Raises DataError if no aspect has proteins both to train with and to hold out.
    """
    store = Store(folder / SEQUENCES)
    ontology_file, annotations, accretion_file, validation = (folder / name for name in _FILES)
    ontology = read_ontology(ontology_file)
    accretion = read_accretion(accretion_file, ontology)
    held_out = {line.strip() for _, line in numbered_lines(validation)}
    ids = [store.id(record) for record in range(len(store))]
    records = {name: record for record, name in enumerate(ids)}
    aspects = {}
    for name, annotated in read_annotations(annotations, ontology, proteins=ids).items():
        training_M = np.array([protein not in held_out for protein in annotated.proteins])
        # Per aspect: none of the held-out proteins may have an annotation in it.
        if training_M.all() or not training_M.any():
            log.warning("%s is left out because all or none of its proteins are held out; see data.terms", name)
            continue
        aspects[name] = AspectData(
            ontology.aspects[name],
            np.array([records[protein] for protein in annotated.proteins]),
            annotated.terms,
            accretion[name],
            training_M,
        )
    if not aspects:
        raise DataError(
            f"{folder}: no aspect has both training and held-out proteins; hold out a different or larger set"
        )
    return FunctionData(store, ids, aspects)


class LabelledTerms:
    """Annotated proteins with the learnt terms, with the interface of a labelled store.

    ``min_count``: minimum number of training proteins per learnt term. Raises DataError if no term has enough.

    Attributes:
        label_space: the K terms, aspect by aspect.
        label_weights: (K,) float32, 1 plus the information accretion in bits.
        targets: (R, K), unknown in aspects in which a protein has no annotation.
        shares: (K,) share of each term among the training proteins annotated in its aspect, with a pseudocount; never 0
            or 1.
        training, validation: int64 records, each ascending.
    """

    weights: NDArray[np.float32] | None = None

    def __init__(self, path: Path, min_count: int) -> None:
        self.path, self._min_count = path, min_count
        self.data = data = read(path)
        self.store = data.store
        self.counts = self.store.manifest.counts
        learnt = [(aspect, aspect.learnt(min_count)) for aspect in data.aspects.values()]
        learners = [(aspect, columns) for aspect, columns in learnt if columns.size]
        if not learners:
            raise DataError(f"{path}: no term has {min_count} training proteins; lower data.terms.min_count")
        self.label_space = LabelSpace(
            "multilabel", tuple(aspect.aspect.terms[column] for aspect, columns in learners for column in columns)
        )
        # Rare and specific terms count more, as in Smin; the 1 keeps terms that nearly every protein has.
        self.label_weights = np.concatenate([1 + aspect.accretion[columns] for aspect, columns in learners]).astype(
            np.float32
        )
        annotated_RA = np.zeros((len(self.store), len(learners)), bool)
        blocks = []
        for number, (aspect, columns) in enumerate(learners):
            annotated_RA[aspect.records, number] = True
            # Scatter the aspect's proteins to the store's records with a 0/1 membership matrix.
            ones = np.ones(len(aspect.records), bool)
            members = csr_array((ones, (aspect.records, np.arange(ones.size))), shape=(len(self.store), ones.size))
            blocks.append(members @ aspect.terms[:, columns])
        aspect_K = np.repeat(np.arange(len(learners)), [columns.size for _, columns in learners])
        terms = csr_array(hstack(blocks, format="csr"))
        # Unknown, not absent: an aspect without annotations was not studied, and the loss ignores NaN.
        self.targets = SparseTargets(terms.indptr, terms.indices, ~annotated_RA, aspect_K)
        annotated = np.flatnonzero(annotated_RA.any(axis=1))
        is_held_out = np.isin(annotated, data.held_out)
        self.training, self.validation = annotated[~is_held_out], annotated[is_held_out]
        annotated_A = annotated_RA[self.training].sum(axis=0)
        # Pseudocounts: with a share of 0 or 1 the initial logit would be infinite.
        self.shares = (terms[self.training].sum(axis=0) + 1) / (annotated_A[aspect_K] + 2)

    @cached_property
    def checksum(self) -> str:
        """Hash (hex) of sequences, terms, held-out proteins and the learnt terms."""
        digest = hashlib.sha256(f"{self.store.checksum} {self._min_count}".encode())
        for name in _FILES:
            digest.update((self.path / name).read_bytes())
        return digest.hexdigest()


def _write(building: Path, store: Store, data: DataSection) -> None:
    terms = data.terms
    annotations, obo = Path(str(terms.annotations)), Path(str(terms.ontology))
    ontology = read_ontology(obo)
    evidence = tuple(terms.evidence) or EXPERIMENTAL
    ids = [store.id(record) for record in range(len(store))]
    read_terms = partial(
        read_annotations, annotations, ontology, proteins=ids, unknown=terms.unknown, evidence=evidence
    )
    known = read_terms()
    accretion = {name: information_accretion(aspect, ontology.aspects[name]) for name, aspect in known.items()}
    if terms.ia:
        accretion |= read_accretion(Path(terms.ia), ontology, terms.unknown)
    held_out = _held_out(store, ids, data, partial(read_terms, before=terms.since))
    files: dict[str, Iterable[str]] = {
        "terms.obo": (f"{line}\n" for _, line in numbered_lines(obo)),
        "annotations.tsv": _annotation_lines(known, ontology),
        "accretion.tsv": _accretion_lines(accretion, ontology),
        "validation.txt": (f"{name}\n" for name in ids if name in held_out),
    }
    for name, lines in files.items():
        with (building / name).open("w", encoding="utf-8") as file:
            file.writelines(lines)


def _annotation_lines(known: Mapping[str, Annotations], ontology: Ontology) -> Iterator[str]:
    """Yield the most specific annotations only, because reading the file propagates them again."""
    for name, annotated in known.items():
        aspect = ontology.aspects[name]
        specific = (annotated.terms > (annotated.terms @ aspect.parents)).tocoo()  # > of bool: this and not that
        for protein, term in zip(*specific.coords, strict=True):
            yield f"{annotated.proteins[protein]}\t{aspect.terms[term]}\n"


def _accretion_lines(accretion: Mapping[str, NDArray[np.float64]], ontology: Ontology) -> Iterator[str]:
    for name, values in accretion.items():
        for term, value in zip(ontology.aspects[name].terms, values.tolist(), strict=True):
            if value:
                yield f"{term}\t{value!r}\n"  # repr: all digits, so that a run and its evaluation use identical weights


def _held_out(store: Store, ids: list[str], data: DataSection, earlier: partial) -> set[str]:
    terms = data.terms
    if terms.validation:
        path = Path(terms.validation)
        listed = {line.strip() for _, line in numbered_lines(path)} - {""}
        held_out = match_ids(sorted(listed), ids, path, "the sequences")
        if len(held_out) < len(listed):
            log.warning(
                "%s: %s without a sequence left out",
                path,
                counted(len(listed) - len(held_out), "protein{s}"),
            )
        return {*held_out.values()}
    if terms.since:
        # The rule of CAFA: proteins without annotation in any aspect before the date.
        return set(ids).difference(*(annotated.proteins for annotated in earlier().values()))
    hashes = store.sequence_hashes  # equal sequences stay together
    if terms.clusters:
        rows = (line.split() for _, line in numbered_lines(Path(terms.clusters)))
        clusters = {row[1]: row[0] for row in rows if len(row) > 1}
        members = match_ids(ids, clusters, "the sequences", terms.clusters)
        if lost := next((name for name in ids if name not in members), None):
            raise DataError(f"{terms.clusters}: no cluster contains {lost}; cluster all sequences")
        # Hash of the cluster's name: a cluster is held out as a whole.
        hashes = np.array([xxhash.xxh3_64_intdigest(clusters[members[name]].encode()) for name in ids], np.uint64)
    _, chosen = split_records(hashes, data.validation_share)
    return {ids[record] for record in chosen.tolist()}
