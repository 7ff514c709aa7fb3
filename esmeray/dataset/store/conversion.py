"""Convert FASTA files or the embedded sample to a store. A store is published whole: it appears only when complete.

In: names of files, the ingest policies, a target. Out: the folder that :class:`~esmeray.dataset.store.reader.Store`
reads.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from esmeray.common.errors import DataError
from esmeray.common.progress import ProgressCallback, conversion_bar, no_progress
from esmeray.common.publishing import exclusive, published, refuse_existing
from esmeray.common.remote import local_path
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.locate import places_of_ids
from esmeray.dataset.fasta.reader import FastaSource, RecordBatch, find_files
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import DataSection, IngestSection, SampleSection
from esmeray.dataset.store.format import DATA_FILE, FORMAT_VERSION, MANIFEST_FILE, SampleSource, StoreManifest
from esmeray.dataset.store.ingest import CleanBlock, Ingest
from esmeray.dataset.store.reader import Store
from esmeray.dataset.store.sample import GENERATOR_VERSION, sample_records
from esmeray.dataset.store.writer import StoreWriter
from esmeray.run_folder.job import REMEDY, other_job

SAMPLE = "sample"
_SAMPLE_BATCH_RECORDS = 512


class CheckedData(NamedTuple):
    """Result of a check: the size of the store that files would give, and the changes that reading makes."""

    records: int
    residues: int
    counts: IngestCounts


def convert(
    sources: list[str],
    target: Path,
    ingest: IngestSection,
    *,
    progress: ProgressCallback = no_progress,
    overwrite: bool = False,
) -> StoreManifest:
    """Convert FASTA files, folders and globs to a store in the folder ``target``.

    Memory does not grow with the files, except for about 60 bytes per record (lengths, hashes, ids), and 100 more if
    repeated ids are left out or renamed.

    Raises ConfigError if the target exists, DataError if a source or record is refused, ResourceError if the disk is
    full or not writable.
    """
    target = absolute(target)
    # Before the lock, which creates the parent folder and may wait for another process.
    source = FastaSource(sources)
    with exclusive(target):
        refuse_existing(target, "store", overwrite, not_a_store)
        return _convert_locked(source, target, ingest, progress)


def check(sources: list[str], policies: IngestSection, *, progress: ProgressCallback = no_progress) -> CheckedData:
    """Read FASTA files as :func:`convert` does, without writing. Also raises DataError if no record is left."""
    source = FastaSource(sources)
    ingest = Ingest(policies, partial(places_of_ids, source.paths), ids_at_end=True)
    records = residues = 0
    for block in _blocks(source, ingest, progress):
        records += len(block.lengths)
        residues += len(block.residues)
    if not records:
        raise DataError(f"{', '.join(sources)}: no records left after the data.ingest settings were applied")
    return CheckedData(records, residues, ingest.counts)


def ensure_store(data: DataSection, default_root: Path, progress: ProgressCallback = no_progress) -> Path:
    """Return the path of the store of a run's data; convert the source first if there is no store yet.

    A source that is a store is used as it is. Otherwise the store is ``data.store``, or a folder in ``default_root``
    named after the source's files and policies. An existing store is verified in full. Several processes may call this
    at the same time.

    Raises DataError if the source can't be read, or if ``data.store`` is damaged or was made from another source;
    ResourceError if the disk is full or not writable.
    """
    target = store_location(data, default_root)
    if source_store(data) is not None:
        if Store(target, verify="full").is_text:
            raise DataError(f"{target}: a store of texts, which only classifiers can read; give proteins")
        return target
    with exclusive(target):
        if target.exists():
            made_with = Store(target, verify="full").manifest
            check_source(target, made_with.source, data, find_files)
            if made_with.ingest != data.ingest:
                raise DataError(
                    f"{target}: built with other data.ingest settings ({made_with.ingest}); {other_store(target)}"
                )
        elif data.source == [SAMPLE]:
            sample = Ingest(data.ingest)
            batches = sample_batches(sample_records(data.sample.records, data.sample.families))
            _write(target, map(sample.clean, batches), sample_source(data.sample), sample)
        else:
            _convert_locked(FastaSource(data.source), target, data.ingest, progress)
    return target


def job_store(sources: list[str], ingest: IngestSection, folder: Path) -> Store:
    """Return the store of a job: the source itself, or a conversion in ``folder`` with a progress bar.

    ``folder`` is the folder of an unfinished job. Raises ConfigError if its store holds other sequences. See
    :func:`ensure_store`.
    """
    data = DataSection(source=sources, ingest=ingest)
    if source_store(data) is None:
        data = data.model_copy(update={"store": str(folder / "store")})
        # The job's other files belong to these sequences, so a new store of changed sources would not match them.
        if (folder / "store" / MANIFEST_FILE).is_file():
            made_with = Store(folder / "store").manifest
            if not (made_with.ingest == ingest and _is_made_of(made_with.source, data, find_files)):
                raise other_job(folder, f"its input {_described(made_with.source)} has changed", REMEDY)
    with conversion_bar("reading sequences") as progress:
        return Store(ensure_store(data, folder, progress))


def store_location(data: DataSection, default_root: Path) -> Path:
    """Return the path of the store of a run's data, whether it exists or not; see :func:`ensure_store`."""
    return location(data, source_store(data), lambda: default_root / _store_name(data))


def location(data: DataSection, source: Path | None, default: Callable[[], Path]) -> Path:
    """Return the absolute path of the source if it is a store, otherwise of ``data.store``, otherwise the default."""
    return absolute(source or (Path(data.store) if data.store else default()))


def _convert_locked(
    source: FastaSource, target: Path, policies: IngestSection, progress: ProgressCallback
) -> StoreManifest:
    ingest = Ingest(policies, partial(places_of_ids, source.paths), ids_at_end=True)
    return _write(target, _blocks(source, ingest, progress), source.finished, ingest)


def _write(
    target: Path, blocks: Iterable[CleanBlock | None], source: list[SourceFile] | SampleSource, ingest: Ingest
) -> StoreManifest:
    """Publish a store of the blocks that ``ingest`` cleans. A list of files grows while they are read."""
    with published(target) as folder, closing(StoreWriter(folder, target)) as writer:
        for block in filter(None, blocks):
            writer.add(block)
        return writer.finish(source, ingest.policies, ingest.counts)


def _blocks(source: FastaSource, ingest: Ingest, progress: ProgressCallback) -> Iterator[CleanBlock]:
    """Yield blocks up to the first refused record. At the end, raise one DataError for all refused records."""
    ingest.counts.files_ignored = source.files_ignored
    source.counts = ingest.counts
    with ingest.faults.raised_at_end(partial(ingest.check_ids, source.once_more)):
        for batch in source.batches():
            block = ingest.clean(batch)
            # After the first fault nothing is written, but all files are read, to report all faults.
            if block is not None and not ingest.faults:
                yield block
            progress(source.bytes_read, source.bytes_total, ingest.counts.records_read)


def sample_batches(records: Iterator[tuple[str, str]]) -> Iterator[RecordBatch]:
    """Yield the records of an embedded sample in batches, as a FASTA reader would."""
    while batch := list(islice(records, _SAMPLE_BATCH_RECORDS)):
        pairs = [(record_id.encode("ascii"), sequence.encode("ascii")) for record_id, sequence in batch]
        yield RecordBatch(Records.of(pairs))


def sample_source(sample: SampleSection) -> SampleSource:
    """Return the description of the embedded sample for a manifest."""
    return SampleSource(**sample.model_dump(), generator_version=GENERATOR_VERSION)


def absolute(path: Path) -> Path:
    """Return the absolute path without resolving links."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolves '..' and '.', follows no link


def not_a_store(
    target: Path, kind: str, files: tuple[str, ...] = (MANIFEST_FILE, DATA_FILE), file_format: str = "esmeray-store"
) -> str | None:
    """Return why an existing target is not a store; None if it is one.

    For :func:`~esmeray.common.publishing.refuse_existing`. ``files`` are the files that a store of this kind may hold,
    the manifest first.
    """
    try:
        is_store = json.loads((target / files[0]).read_bytes())["format"] == file_format
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_store = False
    if not is_store:
        return f"is not a {kind}"
    # A store with other files in its folder is not removed, because they would be removed with it.
    others = sorted({path.name for path in target.iterdir()} - set(files))
    return f"contains {others[0]}, which does not belong to a {kind}" if others else None


def source_store(data: DataSection, manifest_file: str = MANIFEST_FILE, kind: str = "store") -> Path | None:
    """Return the path of the store if ``data.source`` names a store, otherwise None. ``kind`` is its name in messages.

    Raises DataError if there are other sources, too, or if ``data.store`` names another store.
    """
    # Recognized by the manifest, not by the name: a folder of FASTA files may have any name.
    stores = [path for path in map(local_path, data.source) if (path / manifest_file).is_file()]
    if not stores:
        return None
    if len(data.source) > 1:
        raise DataError(f"{stores[0]}: a {kind} can't be combined with other sources; give it as the only source")
    if data.store is not None and absolute(Path(data.store)) != absolute(stores[0]):
        raise DataError(f"{stores[0]}: the source is already a {kind}; remove data.store")
    return stores[0]


def _store_name(data: DataSection) -> str:
    described = [FORMAT_VERSION, data.ingest.model_dump()]
    if data.source == [SAMPLE]:
        return name_of_content(SAMPLE, [*described, sample_source(data.sample).model_dump()])
    paths = find_files(data.source)
    return name_of_content(paths[0].name, [*described, file_identities(paths)])


def file_identities(paths: list[Path]) -> list[tuple[str, int, int, int]]:
    """Return path, size, modification and change time of each file, which identify it without reading it.

    An edited or replaced file has another change time, whatever its modification time. Inodes are left out, because
    some network file systems renumber them at each mount.
    """
    return [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in paths
    ]


def name_of_content(first_name: str, described: list) -> str:
    """Return a readable name that starts like ``first_name`` and ends in a hash of ``described`` (as JSON)."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", first_name.split(".")[0]).strip("-") or "store"
    # A hash, because paths and settings would make names of hundreds of letters.
    return f"{stem}-{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]}"


def check_source(
    path: Path, made_of: list[SourceFile] | SampleSource, data: DataSection, find: Callable[[list[str]], list[Path]]
) -> None:
    """Raise DataError if a store was made from other files, or another sample, than ``data.source`` names."""
    if not _is_made_of(made_of, data, find):
        raise DataError(
            f"{path}: built from {_described(made_of)}, not from the current {', '.join(data.source)}; "
            f"{other_store(path)}"
        )


def _is_made_of(
    made_of: list[SourceFile] | SampleSource, data: DataSection, find: Callable[[list[str]], list[Path]]
) -> bool:
    if data.source == [SAMPLE]:
        return made_of == sample_source(data.sample)
    return isinstance(made_of, list) and same_files(made_of, find(data.source))


def other_store(path: Path) -> str:
    """Return the remedy for a store that does not match the settings."""
    return f"choose another data.store, or use this one with data.source {path}"


def same_files(recorded: list[SourceFile], paths: list[Path]) -> bool:
    """Compare files by size and times; if these differ, by content, which takes a minute for 100 GB."""
    return len(recorded) == len(paths) and all(map(SourceFile.is_content_of, recorded, paths))


def _described(source: list[SourceFile] | SampleSource) -> str:
    if isinstance(source, SampleSource):
        return f"the sample ({counted(source.records, 'record{s}')})"
    more = f" and {counted(len(source) - 1, 'more file{s}')}" if len(source) > 1 else ""
    return f"{source[0].path}{more}"
