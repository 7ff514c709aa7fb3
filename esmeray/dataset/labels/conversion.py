"""Convert labelled files to a labelled store (:mod:`esmeray.dataset.labels.store`): encode labels, split, write.

Shape legend: N records of the store, R residues of all records, concatenated, C outputs, L residues of one record.
"""

import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.common.publishing import exclusive, file_xxh128, published
from esmeray.dataset.batches.random_bits import split_clusters, split_records, split_stratified
from esmeray.dataset.embeddings.arrays import arrays_checksum
from esmeray.dataset.fasta.alphabet import STORE_ALPHABET
from esmeray.dataset.fasta.counts import IngestCounts
from esmeray.dataset.fasta.reader import find_files
from esmeray.dataset.fasta.records import hashes_of
from esmeray.dataset.labels.labelled_file import (
    LabelledRecords,
    check_label_settings,
    find_labelled_files,
    read_labelled,
)
from esmeray.dataset.labels.store import (
    FORMAT_VERSION,
    LABELS_FILE,
    LEFT_OUT,
    MANIFEST_FILE,
    PARTS,
    LabelledManifest,
    LabelledStore,
)
from esmeray.dataset.section import DataSection, LabelsSection, TokenizerSection
from esmeray.dataset.store import conversion as stores
from esmeray.dataset.store.format import SEQUENCES_FOLDER, TEXT_ALPHABET, SampleSource, signed_json
from esmeray.dataset.store.reader import Store
from esmeray.dataset.store.writer import write_sequences
from esmeray.dataset.targets import IGNORED_TARGET, MAPPINGS_FILE, LabelSpace, SparseTargets, check_names
from esmeray.run_folder.job import differences

log = logging.getLogger(__name__)

_KIND = MANIFEST_FILE, "labelled store"
_ONE_CLASS = ("multiclass", "binary")

Clustering: TypeAlias = Callable[[Store, float], NDArray[np.int64]]
"""Function from N proteins and an identity to the (N,) cluster of each."""


def ensure_labelled_store(
    data: DataSection,
    tokenizer: TokenizerSection,
    default_root: Path,
    progress: ProgressCallback = no_progress,
    clustering: Clustering | None = None,
) -> Path:
    """Return the labelled store of a run's data; make it first if it does not exist.

    ``clustering`` makes the clusters of split clusters, since this layer can't align. See
    :func:`esmeray.dataset.store.conversion.ensure_store`. Raises DataError if the source can't be read or learnt
    from, or ``data.store`` is damaged or made from another source; ConfigError for conflicting settings; ResourceError
    if the disk is full.
    """
    target = labelled_store_location(data, tokenizer, default_root)
    if stores.source_store(data, *_KIND) is not None:
        _check_fits(LabelledStore(target, verify="full"), data, tokenizer)
        return target
    with exclusive(target):
        if target.exists():
            _check_made_of(LabelledStore(target, verify="full"), data, tokenizer)
        else:
            _make(data, tokenizer, target, progress, clustering)
    return target


def labelled_store_location(data: DataSection, tokenizer: TokenizerSection, default_root: Path) -> Path:
    """Return the path of a run's labelled store, whether it exists or not. Raises as :func:`ensure_labelled_store`."""
    labels = data.labels
    source = stores.source_store(data, *_KIND)
    if source is None:
        check_label_settings(labels, tokenizer)
        if labels.split == "stratified" and labels.kind not in _ONE_CLASS:
            raise ConfigError(
                f"data.labels.split stratified needs one class per record, but {labels.kind} targets have none: "
                "set it to hash"
            )
    return stores.location(data, source, lambda: default_root / _store_name(data, tokenizer))


def _make(
    data: DataSection,
    tokenizer: TokenizerSection,
    target: Path,
    progress: ProgressCallback,
    clustering: Clustering | None,
) -> None:
    records = read_labelled(
        data.source,
        data.labels,
        tokenizer,
        data.ingest,
        held_out_sources=data.labels.validation_source,
        sample=data.sample,
        progress=progress,
    )
    if records.doubt:
        raise DataError(f"{', '.join(data.source)}: {records.doubt}")
    texts = [text.encode("utf-8") for text in records.texts]
    hashes_N = hashes_of(texts)
    alphabet = TEXT_ALPHABET if tokenizer.content == "text" else STORE_ALPHABET
    source = records.source if isinstance(records.source, SampleSource) else records.source + records.held_out_source
    ingested = IngestCounts(**{name: getattr(records.counts, name) for name in IngestCounts.model_fields})
    with published(target) as folder:
        store_checksum = write_sequences(
            folder, target, records.ids, texts, hashes_N, source, data.ingest, ingested, alphabet
        )
        # The split first: the label space has only labels of training records, and drops held-out records with others.
        parts_N = _split(records, hashes_N, data, folder / SEQUENCES_FOLDER, clustering)
        space = _label_space(records, parts_N, data)
        targets = _encoded(records, parts_N, space, data)
        counts = records.counts.model_copy()
        for code, name in enumerate(PARTS):
            setattr(counts, name, int((parts_N == code).sum()))
        # Always 0 for split hash, which splits by sequence; files and columns may put a sequence on both sides.
        held_out_N = (parts_N != 0) & (parts_N != LEFT_OUT)
        counts.held_out_also_in_training = int(np.isin(hashes_N[held_out_N], hashes_N[parts_N == 0]).sum())
        counts.records_unseen_label = int((parts_N == LEFT_OUT).sum())
        if space.kind == "per_residue":
            letters = Counter("".join(map(str, records.labels)))
            counts.residues_not_known = {
                repr(name): letters[name] for name in data.labels.unknown_letters if letters[name]
            }
            not_known = int(np.count_nonzero(targets == IGNORED_TARGET))
            counts.residues_unseen_label = not_known - sum(counts.residues_not_known.values())
        space.save(folder)
        # Sparse multilabel targets: a protein has about fifty of 40,000 terms.
        tensors: dict[str, NDArray] = {"parts": parts_N}
        if isinstance(targets, SparseTargets):
            tensors |= {"indptr": targets.indptr, "indices": targets.indices, "unknown": targets.unknown[:, 0]}
        else:
            tensors["targets"] = targets
        checksum = arrays_checksum(repr((store_checksum, space.kind, space.names)), tensors)
        # After the checksum, which is independent of the dtype on disk.
        if space.kind == "per_residue":
            tensors["targets"] = tensors["targets"].astype(np.int32)
        save_file(tensors, folder / LABELS_FILE)
        manifest = LabelledManifest(
            num_records=len(records),
            settings=_settings(data, tokenizer),
            source=records.source,
            held_out_source=records.held_out_source,
            labels_source=records.labels_source,
            sequences_checksum=store_checksum,
            files={name: file_xxh128(folder / name) for name in (LABELS_FILE, MAPPINGS_FILE)},
            checksum=checksum,
            counts=counts,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        (folder / MANIFEST_FILE).write_text(signed_json(manifest), encoding="utf-8")


def _split(
    records: LabelledRecords,
    hashes_N: NDArray[np.uint64],
    data: DataSection,
    sequences: Path,
    clustering: Clustering | None,
) -> NDArray[np.uint8]:
    """Return (N,) uint8: index in :data:`PARTS` of each record's part."""
    parts_N = np.zeros(len(records), dtype=np.uint8)
    if records.parts is not None:
        parts_N[:] = [PARTS.index(name) for name in records.parts]
        return parts_N
    # All records of a distinct sequence or of a group stay on one side.
    units_N = hashes_N
    if records.groups is not None:
        units_N = hashes_of([name.encode() for name in records.groups])
    classes_N = np.zeros(len(records), dtype=np.int64)
    if data.labels.split in ("stratified", "clusters") and data.labels.kind in _ONE_CLASS:
        # Before the split, whose message for numbers would be that each class occurs only once.
        check_names(sorted(set(records.labels)), data.labels.kind)  # type: ignore[arg-type]
        _, classes_N = np.unique(np.array(records.labels), return_inverse=True)
    if data.labels.split == "stratified":
        _, validation = split_stratified(units_N, classes_N, data.validation_share, records.groups is None)
    elif data.labels.split == "clusters":
        assert clustering is not None, "required for this split"
        clusters_N = clustering(Store(sequences), data.labels.identity)
        validation = split_clusters(clusters_N, hashes_N, classes_N, data.validation_share)
    else:
        _, validation = split_records(units_N, data.validation_share)
    parts_N[validation] = PARTS.index("validation")
    return parts_N


def _label_space(records: LabelledRecords, parts_N: NDArray[np.uint8], data: DataSection) -> LabelSpace:
    labels: Any = records.labels
    training_N = parts_N == 0
    chosen = labels[training_N] if isinstance(labels, np.ndarray) else list(compress(labels, training_N))
    try:
        return LabelSpace.of(chosen, data.labels.kind, data.labels.label_columns, data.labels.unknown_letters)
    except DataError as error:
        raise DataError(f"{data.source[0]}: {error}") from error


def _encoded(
    records: LabelledRecords, parts_N: NDArray[np.uint8], space: LabelSpace, data: DataSection
) -> NDArray | SparseTargets:
    """Encode all labels. Records with a label that no training record has are marked as left out in ``parts_N``."""
    targets, unseen = space.encode(records.labels, data.labels.unknown_letters)
    if unseen is None:
        return targets
    if data.labels.unseen_labels == "error":
        raise DataError(
            f"{records.place(unseen.record)}: the label {unseen.name!r} occurs only in held-out records; add training "
            "records with it, or give --data.labels.unseen_labels skip"
            + (", or --data.labels.split stratified" if data.labels.split == "hash" else "")
        )
    if space.kind != "per_residue":
        left_out_N = targets.unknown[:, 0] if isinstance(targets, SparseTargets) else targets == IGNORED_TARGET
        parts_N[left_out_N] = LEFT_OUT
        if data.labels.split == "files" and not (parts_N == PARTS.index("validation")).any():
            raise DataError(
                f"{data.labels.validation_source[0]}: none of the held-out labels occurs in training; give "
                "held-out records with training labels"
            )
    return targets


def _settings(data: DataSection, tokenizer: TokenizerSection) -> dict[str, Any]:
    """Return the settings that the content of a labelled store depends on, apart from its files."""
    # Files are identified by content, so their paths are excluded. The identity only matters to one split.
    excluded = {"validation_source", "labels_file", "mask_file"}
    if data.labels.split != "clusters":
        excluded.add("identity")
    settings: dict[str, Any] = {
        "content": tokenizer.content,
        "labels": data.labels.model_dump(mode="json", exclude=excluded),
        "ingest": data.ingest.model_dump(),
    }
    # If files or columns define the held-out part, validation_share has no effect.
    if data.labels.split in ("hash", "stratified", "clusters"):
        settings["validation_share"] = data.validation_share
    return settings


def _store_name(data: DataSection, tokenizer: TokenizerSection) -> str:
    described = [FORMAT_VERSION, _settings(data, tokenizer)]
    if data.labels.validation_source:
        described.append(stores.file_identities(find_labelled_files(data.labels.validation_source)))
    if data.labels.labels_file:
        described.append(stores.file_identities(_labels_files(data.labels)))
    if data.source == [stores.SAMPLE]:
        return stores.name_of_content("sample-labelled", [*described, stores.sample_source(data.sample).model_dump()])
    paths = find_labelled_files(data.source)
    return stores.name_of_content(
        f"{paths[0].name.split('.')[0]}-labelled", [*described, stores.file_identities(paths)]
    )


def _labels_files(labels: LabelsSection) -> list[Path]:
    return [path for name in (labels.labels_file, labels.mask_file) if name for path in find_files([name])]


def _check_fits(labelled: LabelledStore, data: DataSection, tokenizer: TokenizerSection) -> None:
    """Raise DataError if a labelled store has another kind or content than the settings. Its sources don't matter."""
    for key, held, wanted in (
        ("data.labels.kind", labelled.label_space.kind, data.labels.kind),
        ("model.tokenizer.content", "text" if labelled.store.is_text else "protein", tokenizer.content),
    ):
        if held != wanted:
            raise DataError(f"{labelled.path}: it was built with {key} {held}, not {wanted}; set {key} to {held}")


def _check_made_of(labelled: LabelledStore, data: DataSection, tokenizer: TokenizerSection) -> None:
    manifest = labelled.manifest
    remedy = stores.other_store(labelled.path)
    stores.check_source(labelled.path, manifest.source, data, find_labelled_files)
    if not stores.same_files(manifest.held_out_source, find_labelled_files(data.labels.validation_source)):
        raise DataError(f"{labelled.path}: built with other files in data.labels.validation_source; {remedy}")
    if not stores.same_files(manifest.labels_source, _labels_files(data.labels)):
        raise DataError(f"{labelled.path}: built with another data.labels.labels_file or mask_file; {remedy}")
    if labelled.weights is not None:
        log.warning(
            "%s: made with weights of records (data.labels.weight_column), which count in the loss", labelled.path
        )
    changes = differences(manifest.settings, _settings(data, tokenizer))
    if changes:
        raise DataError(f"{labelled.path}: built with other settings ({changes[0]}); {remedy}")
