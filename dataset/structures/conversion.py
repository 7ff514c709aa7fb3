"""Structure files, or the embedded sample, to a structure store: complete under its name, or not there at all.

In: names of files, folders and globs, and the settings. Out: the folder that
:class:`~dataset.structures.store.StructureStore` reads. Files are read one after the other; all that are refused are
named together, the first ten with what is wrong.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.progress import ConversionProgress, ProgressCallback
from common.publishing import exclusive, file_xxh128, published, refuse_existing
from common.text import counted
from dataset.batches.splitting import split_records
from dataset.embeddings.arrays import open_arrays
from dataset.fasta.alphabet import clean
from dataset.fasta.counts import IngestCounts, SourceFile
from dataset.fasta.reader import FastaSource, find_files
from dataset.fasta.records import hashes_of
from dataset.store.conversion import (
    SAMPLE,
    absolute,
    check_source,
    file_identities,
    name_of_content,
    other_store,
    same_files,
    source_store,
)
from dataset.store.format import MANIFEST_FILE as STORE_MANIFEST
from dataset.store.format import SampleSource, signed_json
from dataset.store.ingest import blocks
from dataset.store.reader import Store
from dataset.store.writer import StoreWriter
from dataset.structures.files import SUFFIXES, is_structure_name, read_structures
from dataset.structures.predictions import Predicted, missing, predicted
from dataset.structures.sample import GENERATOR_VERSION, sample_structures
from dataset.structures.store import (
    ARRAYS_FILE,
    FORMAT_VERSION,
    HELD_OUT,
    MANIFEST_FILE,
    SEQUENCES_FOLDER,
    Structure,
    StructureCounts,
    StructureManifest,
    StructureStore,
    arrays_checksum,
    write_structures,
)
from train_config.diffusion_schema import StructuresSection
from train_config.schema import DataSection

_SHOWN = 10


def convert_structures(
    sources: list[str],
    target: Path,
    data: DataSection,
    *,
    progress: ProgressCallback | None = None,
    overwrite: bool = False,
) -> StructureManifest:
    """Convert structure files to a structure store in the folder ``target``.

    Raises ConfigError where the target exists, DataError where files are refused, ResourceError where the disk is full.
    """
    target = absolute(target)
    data = data.model_copy(update={"source": sources})
    with exclusive(target):
        refuse_existing(target, "structures2lmdb", overwrite, _not_a_store)
        return _make(data, target, progress)


def ensure_structure_store(data: DataSection, default_root: Path, progress: ProgressCallback | None = None) -> Path:
    """The structure store of a run's data: a fitting one that exists, else one made now; see
    :func:`dataset.store.conversion.ensure_store`."""
    target = structure_store_location(data, default_root)
    if source_store(data, MANIFEST_FILE, "structure store") is not None:
        return StructureStore(target, verify="full").path
    with exclusive(target):
        if target.exists():
            _check_made_of(StructureStore(target, verify="full"), data)
        else:
            _make(data, target, progress)
    return target


def structure_store_location(data: DataSection, default_root: Path) -> Path:
    """Path of the structure store of a run's data, made or not."""
    ready = source_store(data, MANIFEST_FILE, "structure store")
    if ready is not None:
        return absolute(ready)
    return absolute(Path(data.store)) if data.store else absolute(default_root) / _store_name(data)


def find_structure_files(sources: list[str]) -> list[Path]:
    """The structure files that files, folders (searched to any depth) and globs stand for, each once, in order.

    Raises DataError where a name stands for nothing.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        path = Path(source)
        if path.is_dir():
            paths = sorted(each for each in path.rglob("*") if each.is_file() and is_structure_name(each))
            if not paths:
                raise DataError(f"{source}: the folder holds no structure file ({', '.join(SUFFIXES)}, plain or .gz)")
        elif path.is_file():
            paths = [path]
        else:
            names = glob.glob(source, recursive=True) if glob.has_magic(source) else []  # noqa: PTH207
            paths = sorted(each for each in map(Path, names) if each.is_file())
            if not paths:
                raise DataError(f"{source}: no such file or folder, and no file matches")
        for each in paths:
            found.setdefault(each.resolve(), each)
    return list(found.values())


def _files(data: DataSection) -> list[Path]:
    """The files of the source."""
    return find_structure_files(data.source) if data.structures.predictions is None else _sequence_files(data.source)


def _make(data: DataSection, target: Path, progress: ProgressCallback | None) -> StructureManifest:
    counts = StructureCounts()
    held_out_files = (
        find_structure_files(data.structures.validation_source) if data.structures.validation_source else []
    )
    source: list[SourceFile] | SampleSource
    if data.structures.predictions is not None:
        structures = list(_predicted(data, counts))
        source = [_described(path) for path in _sequence_files(data.source)]
    elif data.source == [SAMPLE]:
        structures = list(sample_structures(data.sample.records, data.sample.seed))
        counts.chains, source = len(structures), _sample_source(data)
    else:
        files = find_structure_files(data.source)
        structures = _read(files, data.structures, counts, progress)
        source = [_described(path) for path in files]
    num_given = len(structures)
    structures += _read(held_out_files, data.structures, counts, progress)
    _check_ids(structures)
    hashes_N = hashes_of([each.residues.encode("ascii") for each in structures])
    parts_N = np.zeros(len(structures), dtype=np.int8)
    held_out = np.arange(num_given, len(structures))
    if not held_out_files and len(set(hashes_N.tolist())) > 1:
        _, held_out = split_records(hashes_N, data.validation_share)
    parts_N[held_out] = HELD_OUT
    names, labels_N = _labels(structures, data.structures)
    with published(target) as folder:
        sequences = folder / SEQUENCES_FOLDER
        sequences.mkdir()
        texts = [each.residues.encode("ascii") for each in structures]
        with closing(StoreWriter(sequences, target / SEQUENCES_FOLDER)) as writer:
            for block in blocks([each.id for each in structures], texts, hashes_N):
                writer.add(block)
            checksum = writer.finish(source, data.ingest, IngestCounts(records_read=len(texts))).checksum
        write_structures(folder, structures, labels_N, parts_N)
        manifest = StructureManifest(
            num_records=len(structures),
            settings=_settings(data),
            source=source,
            held_out_source=[_described(path) for path in held_out_files],
            label_names=names,
            sequences_checksum=checksum,
            checksum=arrays_checksum(checksum, open_arrays(folder / ARRAYS_FILE)),
            counts=counts,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        (folder / MANIFEST_FILE).write_text(signed_json(manifest), encoding="utf-8")
    return manifest


def _read(
    files: list[Path], section: StructuresSection, counts: StructureCounts, progress: ProgressCallback | None
) -> list[Structure]:
    """Chains of all files. Raises one DataError for all files that are refused."""
    structures: list[Structure] = []
    refused: list[str] = []
    total = sum(path.stat().st_size for path in files)
    done = 0
    for path in files:
        try:
            structures += read_structures(path, section, counts)
        except DataError as error:
            refused += error.problems
        done += path.stat().st_size
        if progress is not None:
            progress(ConversionProgress(done, total, len(structures)))
    if refused:
        shown = refused[:_SHOWN]
        heading = [] if len(refused) == 1 else [f"{counted(len(refused), 'file{s}')} refused; the first {len(shown)}"]
        raise DataError(*heading, *shown)
    return structures


def _predicted(data: DataSection, counts: StructureCounts) -> Iterator[Structure]:
    """Proteins of FASTA files or of a store with their predicted structures."""
    folder = Path(data.structures.predictions or "")
    ids, texts = read_proteins(data.source)
    absent_N = missing(folder, texts)
    if absent_N.any() and data.structures.on_miss == "error":
        first = ids[int(absent_N.argmax())]
        raise DataError(
            f"{folder}: has no structure of {counted(int(absent_N.sum()), 'protein{s}')}, first {first}; predict them "
            "with predict_structures, or set data.structures.on_miss to null"
        )
    counts.chains = len(ids)
    kept = predicted(folder, [text for text, absent in zip(texts, absent_N.tolist(), strict=True) if not absent])
    for record, text, absent in zip(ids, texts, absent_N.tolist(), strict=True):
        length = len(text)
        found = Predicted(np.full((length, 4, 3), np.nan, np.float32), np.zeros(length, np.float32))
        if not absent:
            found = next(kept)
        chain = np.zeros(length, np.int8)
        yield Structure(record, text, found.coordinates, found.confidence.astype(np.int8), chain, ("A",))


def read_proteins(sources: list[str]) -> tuple[list[str], list[str]]:
    """Ids and residues of FASTA files, or of a store."""
    if (Path(sources[0]) / STORE_MANIFEST).is_file():
        store = Store(sources[0])
        return [store.id(index) for index in range(len(store))], [store.text(index) for index in range(len(store))]
    ids, texts = [], []
    for batch in FastaSource(sources).batches():
        ids += [record.decode("utf-8") for record in batch.records.ids.split()]
        texts += [clean(bytes(sequence)).residues.decode("ascii") for sequence in batch.records.sequences]
    return ids, texts


def _sequence_files(sources: list[str]) -> list[Path]:
    if (Path(sources[0]) / STORE_MANIFEST).is_file():
        return [Path(sources[0]) / STORE_MANIFEST]
    return find_files(sources)


def _check_ids(structures: list[Structure]) -> None:
    seen: set[str] = set()
    for each in structures:
        if each.id in seen:
            raise DataError(f"{each.id}: two files give a record of this id; rename one of them")
        seen.add(each.id)


def _labels(structures: list[Structure], section: StructuresSection) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the classes, and (N,) the class of each record, -1 for none."""
    if section.labels is None:
        return [], np.full(len(structures), -1, dtype=np.int64)
    by_id = dict(_label_rows(Path(section.labels)))
    names = sorted({by_id[each.id] for each in structures if each.id in by_id})
    if not names:
        raise DataError(f"{section.labels}: has no id of these structures, such as {structures[0].id}")
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers[by_id[each.id]] if each.id in by_id else -1 for each in structures]
    return names, np.array(labels, dtype=np.int64)


def _label_rows(path: Path) -> Iterator[tuple[str, str]]:
    import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            if not {"id", "label"} <= set(rows.fieldnames or ()):
                raise DataError(f"{path}: needs the columns id and label")
            for row in rows:
                if row["label"]:
                    yield row["id"], row["label"]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read ({error})") from error


def _described(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(
        path=str(path.resolve()), bytes=status.st_size, mtime_ns=status.st_mtime_ns, xxh128=file_xxh128(path)
    )


def _sample_source(data: DataSection) -> SampleSource:
    return SampleSource(**data.sample.model_dump(), generator_version=GENERATOR_VERSION)


def _settings(data: DataSection) -> dict[str, Any]:
    """The settings that the content of a structure store depends on, besides its files."""
    settings: dict[str, Any] = {"structures": data.structures.model_dump(mode="json", exclude={"validation_source"})}
    if not data.structures.validation_source:
        settings["validation_share"] = data.validation_share
    return settings


def _store_name(data: DataSection) -> str:
    """Readable, and another one for other files or settings."""
    described: list[Any] = [FORMAT_VERSION, _settings(data)]
    if data.structures.validation_source:
        described.append(file_identities(find_structure_files(data.structures.validation_source)))
    if data.structures.labels:
        described.append(file_identities([Path(data.structures.labels)]))
    if data.source == [SAMPLE]:
        return name_of_content("sample-structures", [*described, _sample_source(data).model_dump()])
    if data.structures.predictions is not None:
        shards = sorted(path.name for path in Path(data.structures.predictions).glob("*.safetensors"))
        described.append([data.structures.predictions, shards])
    paths = _files(data)
    return name_of_content(f"{paths[0].name.split('.')[0]}-structures", [*described, file_identities(paths)])


def _check_made_of(store: StructureStore, data: DataSection) -> None:
    """Refuse a store that was made of something else than the settings say."""
    remedy = other_store(store.path)
    if data.source == [SAMPLE]:
        if store.manifest.source != _sample_source(data):
            raise DataError(f"{store.path}: made of another sample; {remedy}")
    else:
        check_source(store.path, store.manifest.source, data, lambda _: _files(data))
    held_out = data.structures.validation_source
    if not same_files(store.manifest.held_out_source, find_structure_files(held_out) if held_out else []):
        raise DataError(f"{store.path}: made with other files of data.structures.validation_source; {remedy}")
    if store.manifest.settings != _settings(data):
        raise DataError(f"{store.path}: made with other settings of data.structures; {remedy}")


def _not_a_store(target: Path, _: str) -> str | None:
    try:
        StructureStore(target)
    except DataError:
        return "is not a structure store"
    others = sorted({path.name for path in target.iterdir()} - {MANIFEST_FILE, ARRAYS_FILE, SEQUENCES_FOLDER})
    return f"holds {others[0]}, which no structure store does" if others else None
