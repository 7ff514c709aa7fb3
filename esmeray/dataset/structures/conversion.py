"""Convert structure files, sequences without structures, or the embedded sample to a structure store.

A store is published whole: it appears only when complete. All refused files are reported together, the first ten with
the reason.
"""

from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.common.publishing import exclusive, published, refuse_existing
from esmeray.common.remote import local_path
from esmeray.common.text import counted
from esmeray.dataset.batches.random_bits import split_records
from esmeray.dataset.embeddings.arrays import arrays_checksum, open_arrays
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.reader import files_ignored, find_files, is_fasta_name
from esmeray.dataset.fasta.records import hashes_of
from esmeray.dataset.labels.values import labels_by_id, labels_of
from esmeray.dataset.section import DataSection, IngestSection, StructuresSection
from esmeray.dataset.store import conversion as stores
from esmeray.dataset.store import format as store_format
from esmeray.dataset.store.writer import write_sequences
from esmeray.dataset.structures import store as layout
from esmeray.dataset.structures.predictions import keys, predictions_of
from esmeray.dataset.structures.sample import GENERATOR_VERSION, sample_structure

SUFFIXES = (".pdb", ".ent", ".cif", ".mmcif", ".bcif")
_SHOWN = 10
_MIN_RESIDUES = 10
"""Minimum number of residues with coordinates in training; shorter chains are left out and counted."""
_KIND = layout.MANIFEST_FILE, "structure store"
_SOURCE, _HELD_OUT, _LABELS = "data.source", "data.structures.validation_source", "data.structures.labels"


def convert_structures(
    sources: list[str],
    target: Path,
    data: DataSection,
    *,
    progress: ProgressCallback = no_progress,
    overwrite: bool = False,
) -> layout.StructureManifest:
    """Convert structure files, or sequences with predictions, to a structure store in the folder ``target``.

    Raises ConfigError if the target exists, DataError if files are refused or predictions are missing, ResourceError
    if the disk is full.
    """
    target = stores.absolute(target)
    data = data.model_copy(update={"source": sources})
    # Training may use sequences alone. For an explicit conversion to structures, that is a mistake.
    if data.predictions.folder is None and sources != [stores.SAMPLE] and (_is_store(sources) or _is_fasta(sources)):
        raise DataError(
            f"{sources[0]}: sequences without structures: predict structures with 'esmeray design fold "
            f"--fold.input {sources[0]}', then give its cache as --data.predictions.folder"
        )
    with exclusive(target):
        # Checked inside the lock, because another process may have created it while we waited.
        is_other = partial(
            stores.not_a_store,
            files=(layout.MANIFEST_FILE, layout.ARRAYS_FILE, store_format.SEQUENCES_FOLDER),
            file_format="esmeray-structures",
        )
        refuse_existing(target, "structure store", overwrite, is_other)
        return _make(data, target, progress)


def ensure_structure_store(data: DataSection, default_root: Path, progress: ProgressCallback = no_progress) -> Path:
    """Return the path of a run's structure store; make it first if it does not exist.

    See :func:`esmeray.dataset.store.conversion.ensure_store`.
    """
    target = structure_store_location(data, default_root)
    if stores.source_store(data, *_KIND) is not None:
        return layout.StructureStore(target, verify="full").path
    with exclusive(target):
        if target.exists():
            _check_made_of(layout.StructureStore(target, verify="full"), data)
        else:
            _make(data, target, progress)
    return target


def structure_store_location(data: DataSection, default_root: Path) -> Path:
    """Return the path of a run's structure store, whether it exists or not. Its name depends on files and settings."""
    return stores.location(data, stores.source_store(data, *_KIND), lambda: default_root / _store_name(data))


def _store_name(data: DataSection) -> str:
    files = _files(data)
    first = stores.SAMPLE if data.source == [stores.SAMPLE] else files[_SOURCE][0].name.split(".")[0]
    identities = {key: stores.file_identities(paths) for key, paths in files.items()}
    return stores.name_of_content(f"{first}-structures", [layout.FORMAT_VERSION, _settings(data), identities])


def is_structure_name(path: Path) -> bool:
    """Return whether the name has a suffix of structure files."""
    return path.name.lower().removesuffix(".gz").endswith(SUFFIXES)


def find_structure_files(sources: list[str]) -> list[Path]:
    """Find structure files; see :func:`~esmeray.dataset.fasta.reader.find_files`."""
    return find_files(sources, is_structure_name, f"structure file ({', '.join(SUFFIXES)}, plain or .gz)")


def read_proteins(sources: list[str], policies: IngestSection | None = None) -> tuple[list[str], list[str]]:
    """Return ids and residues of FASTA files, checked according to the policies, or of a store."""
    with TemporaryDirectory() as folder:
        store = stores.job_store(sources, policies or IngestSection(), Path(folder))
        indices = range(len(store))
        return list(map(store.id, indices)), list(map(store.text, indices))


def _files(data: DataSection) -> dict[str, list[Path]]:
    source = []
    if _is_store(data.source):
        source = [local_path(data.source[0]) / store_format.MANIFEST_FILE]
    elif data.source != [stores.SAMPLE]:
        source = (find_files if _is_fasta(data.source) else find_structure_files)(data.source)
    section = data.structures
    return {
        _SOURCE: source,
        _HELD_OUT: find_structure_files(section.validation_source),
        _LABELS: [] if section.labels is None else find_files([section.labels]),
    }


def _is_store(sources: list[str]) -> bool:
    return (local_path(sources[0]) / store_format.MANIFEST_FILE).is_file()


def _is_fasta(sources: list[str]) -> bool:
    """Return whether the sources are FASTA, by the first source's name or the names in its folder."""
    # The names decide, so that a dry run or an early error opens none of thousands of files.
    first = local_path(sources[0])
    files = [first]
    if first.is_dir():
        files = [path for path in first.rglob("*") if path.is_file()]
    return any(map(is_fasta_name, files)) and not any(map(is_structure_name, files))


def _make(data: DataSection, target: Path, progress: ProgressCallback) -> layout.StructureManifest:
    counts, files = layout.StructureCounts(), _files(data)
    if data.source == [stores.SAMPLE]:
        structures = list(map(sample_structure, range(data.sample.records)))
        counts.chains = len(structures)
    elif _is_store(data.source) or _is_fasta(data.source):
        ids, residues = read_proteins(data.source, data.ingest)
        structures = list(map(layout.Structure.unknown, ids, residues))
        predictions = predictions_of(data)
        if predictions is not None:
            predictions.check(keys(residues))
    else:
        structures = read_files(files[_SOURCE], data.structures, counts, progress)
        counts.files_ignored = files_ignored(data.source, is_structure_name)
    num_given = len(structures)
    # Held-out records come last, so that their numbers identify them.
    structures += read_files(files[_HELD_OUT], data.structures, counts, progress)
    check_ids(structures)
    texts = [structure.residues.encode("ascii") for structure in structures]
    hashes_N = hashes_of(texts)
    parts_N = np.zeros(len(structures), dtype=np.int8)
    held_out = np.arange(num_given, len(structures))
    # A single distinct sequence can't be split, so it is used for training.
    if not held_out.size and len(set(hashes_N.tolist())) > 1:
        _, held_out = split_records(hashes_N, data.validation_share)
    parts_N[held_out] = layout.HELD_OUT
    names, labels_N = _labels(structures, data.structures)
    # Read a second time for the checksums: structure files are small, and parsers take paths.
    described = {key: [SourceFile.of(path) for path in paths] for key, paths in files.items()}
    with published(target) as folder:
        checksum = write_sequences(
            folder,
            target,
            [structure.id for structure in structures],
            texts,
            hashes_N,
            described[_SOURCE],
            data.ingest,
            IngestCounts(records_read=len(texts)),
        )
        layout.write_structures(folder, structures, labels_N, parts_N)
        manifest = layout.StructureManifest(
            settings=_settings(data),
            files=described,
            label_names=names,
            sequences_checksum=checksum,
            checksum=arrays_checksum(checksum, open_arrays(folder / layout.ARRAYS_FILE)),
            counts=counts,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        (folder / layout.MANIFEST_FILE).write_text(store_format.signed_json(manifest), encoding="utf-8")
    return manifest


def read_files(
    files: list[Path],
    section: StructuresSection,
    counts: layout.StructureCounts,
    progress: ProgressCallback = no_progress,
    min_residues: int = _MIN_RESIDUES,
) -> list[layout.Structure]:
    """Return the chains of all files. Raises one DataError for all refused files."""
    from esmeray.dataset.structures.files import read_structures  # imports biotite, which dry runs don't need

    structures: list[layout.Structure] = []
    refused: list[str] = []
    total = sum(path.stat().st_size for path in files)
    done = 0
    # Try every file: several of thousands may be bad, and finding them one run at a time would take hours.
    for path in files:
        try:
            structures += read_structures(path, section, counts, min_residues)
        except DataError as error:
            refused += error.problems
        done += path.stat().st_size
        progress(done, total, len(structures))
    if len(refused) > 1:
        refused.insert(0, f"{counted(len(refused), 'file{s}')} refused; the first {min(len(refused), _SHOWN)} follow")
    if refused:
        raise DataError(*refused[: _SHOWN + 1])
    return structures


def check_ids(structures: list[layout.Structure]) -> None:
    for record_id, count in Counter(structure.id for structure in structures).items():
        if count > 1:
            raise DataError(f"{record_id}: two records have this id; rename one of them or its file")


def _labels(structures: list[layout.Structure], section: StructuresSection) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of the classes, and (N,) the class of each record, -1 for none."""
    if section.labels is None:
        return [], np.full(len(structures), -1, dtype=np.int64)
    # Matched by id: a file may have more or fewer chains than the table has rows.
    table = labels_by_id(Path(section.labels), "label")
    labels = labels_of([structure.id for structure in structures], table, "the structures", section.labels)
    names = sorted({*labels.values()})
    numbers = {record: names.index(label) for record, label in labels.items()}
    return names, np.array([numbers.get(structure.id, -1) for structure in structures], dtype=np.int64)


def _settings(data: DataSection) -> dict[str, Any]:
    """Return the settings that the content of a structure store depends on, apart from its files."""
    # The limits on file size are excluded: they refuse files and change no content.
    section = data.structures
    settings: dict[str, Any] = {
        "chains": section.chains,
        "min_residues": _MIN_RESIDUES,
        "ca_only": section.ca_only,
        "predicted": section.predicted,
    }
    if not section.validation_source:
        settings["validation_share"] = data.validation_share
    if _is_fasta(data.source):
        settings["ingest"] = data.ingest.model_dump()
    # Files are identified by checksums, the sample by its settings.
    if data.source == [stores.SAMPLE]:
        seed = 0  # a setting in earlier versions
        settings["sample"] = [data.sample.records, seed, GENERATOR_VERSION]
    return settings


def _check_made_of(store: layout.StructureStore, data: DataSection) -> None:
    for key, paths in _files(data).items():
        if not stores.same_files(store.manifest.files[key], paths):
            raise DataError(f"{store.path}: built from other files than {key} names; {stores.other_store(store.path)}")
    if store.manifest.settings != _settings(data):
        raise DataError(f"{store.path}: built with other data settings; {stores.other_store(store.path)}")
